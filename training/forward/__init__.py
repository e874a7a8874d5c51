"""Differentiable forward passes of a HAMburger, and the models that they run on.

It must not know batches' origin, losses or runs.
"""
