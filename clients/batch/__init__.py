"""`hamburger run-batch`: a file of requests, asked of a server.

It must not know anything of the server but the wire.
"""
