"""The GPU path: Triton kernels, the modules that launch them, and weights of 8 bits.

It must not know requests, CUDA graphs or ranks.
"""
