"""The CPU path: compiled kernels (kernels/) with weights in 4 or 8 bits, and oneDNN's blocked linears.

It must not know requests, GPUs, graphs or ranks.
"""
