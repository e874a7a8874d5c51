"""replay.py: what a step costs, real traces through the real engine core in virtual time, and the report about them.

It must not know HTTP or any peer; only `measurement` and `live_replay` know the model.
"""
