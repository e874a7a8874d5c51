"""`hamburger plan`: what a machine can serve, from shapes and memory alone. No torch, no weights.

It must not know a running engine.
"""
