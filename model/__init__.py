"""Tensors, not requests: the HAMburger model, its sampler and its checkpoints."""
