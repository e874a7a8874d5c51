"""Examples -> packed batches, in an order that a seed decides.

It must not know losses or runs.
"""
