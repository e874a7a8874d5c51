"""`hamburger eval-tasks`: tasks with known answers, asked of a server and scored.

It must not know anything of the server but the wire.
"""
