"""HTTP clients: a terminal chat, a load generator, batches and evaluations of servers.

They must not know anything of the server but the wire: none of the other packages, and no torch.
"""
