"""Tool calls: what the model may call, and its text back into calls.

It must not know routes or running engines.
"""
