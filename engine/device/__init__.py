"""The torch side of the engine: loading, memory, and the runner that turns scheduled batches into groups.

It must not know text (but what a grammar allows next), HTTP or how sequences are scheduled.
"""
