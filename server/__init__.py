"""HTTP, not tensors: the OpenAI-compatible server and the command line.

It must not know torch, nor what happens inside a step.
"""
