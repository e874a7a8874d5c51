"""Decoding steps as CUDA graphs: captured pieces of static shape, and what they take of memory.

It must not know which backend computes inside a piece.
"""
