"""gpu.py: stages, models, contestants and the GPU's own tests, in limited time, and the report about them.

It must not know how a contestant is started, asked and timed: comparison/ does that.
"""
