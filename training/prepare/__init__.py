"""The commands that make data: distill, segment, regroup, inspect.

They must not know training runs.
"""
