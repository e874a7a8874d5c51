"""Devices: which one, transfers to and from it, memory that ends, and what follows a step on it.

It must not know layers or weights.
"""
