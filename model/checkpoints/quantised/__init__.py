"""Hugging Face checkpoints whose weights are quantised: how they say so, and their numbers.

Nothing is exported here: import from the module that defines a name.
"""
