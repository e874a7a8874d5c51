"""Grammars: written as clients ask, compiled, tried in processes of their own, and followed by answers.

It must not know tensors, slots or scheduling.
"""
