"""The torch side of the engine: loading, memory, and the runner that turns scheduled batches into groups.

It must not know text, HTTP or how sequences are scheduled.
"""
