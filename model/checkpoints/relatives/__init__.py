"""Kinds of models that are another in other words: their configuration and weights are retold as it has them.

A module a family, and retelling.py, which alone is called. At import it must not need torch: the HTTP process reads
configurations.
"""
