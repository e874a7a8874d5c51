"""What configurations say about a model: its shape, kind and rotary embedding, never its weights.

It must not import torch: `hamburger plan` and the HTTP process ask this too.
"""
