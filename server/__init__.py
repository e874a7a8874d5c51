"""HTTP, not tensors: the OpenAI-compatible server and the command line."""
