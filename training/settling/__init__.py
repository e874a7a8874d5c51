"""What settled slots cost: which old tokens of an answer can go, measured by masks over whole texts.

It knows texts, attention and slots' places; it must not know the engine's blocks.
"""
