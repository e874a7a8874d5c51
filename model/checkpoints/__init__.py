"""Every kind of checkpoint -> a ModelConfig and tensors under one strict set of names.

It must not know what computes with them, nor the device that they will lie on.
"""
