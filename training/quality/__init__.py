"""`hamburger eval-quality`: tokens per KV against quality on held-out prompts.

It must not know how a model was trained.
"""
