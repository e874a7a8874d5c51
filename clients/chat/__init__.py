"""`hamburger chat`: a conversation in the terminal.

It must not know anything of the server but the wire.
"""
