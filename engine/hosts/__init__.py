"""Where the engine's loop runs: in a process of its own, or in a thread of this one.

It must not know requests' meaning, HTTP or tensors.
"""
