"""What clients send: the fields of each body, their types, and what they ask of the engine.

It must not know routes or running engines.
"""
