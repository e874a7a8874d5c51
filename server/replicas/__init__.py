"""Several servers behind one address: affinity, forwarding, and Ray Serve.

It must not know models or tensors.
"""
