"""A training run: its folder, steps, journal and validation.

It must not know how data were made, nor what becomes of a checkpoint.
"""
