"""The plain module in torch: a trunk with its graft, as checkpoints fill it and training changes it.

It must not know steps, nor who else computes with its weights.
"""
