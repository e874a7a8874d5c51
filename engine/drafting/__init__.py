"""Drafts of verified groups: who makes them, how likely they are accepted, and how many of them pay.

It decides; it must not know tensors, blocks or requests.
"""
