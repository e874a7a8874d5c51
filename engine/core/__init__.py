"""The deciding core: sequences, blocks, scheduling, steps. No IO, no clock of its own, no tensors.

It must not know text (but where an answer stands in its grammar), HTTP or devices.
"""
