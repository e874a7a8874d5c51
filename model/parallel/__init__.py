"""One model over several ranks: shards, collectives, and the calls that every rank makes in a step.

It must not know requests, nor how the processes were started.
"""
