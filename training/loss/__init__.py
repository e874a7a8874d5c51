"""The objective: token losses, distillation, stop targets.

It must not know runs or files.
"""
