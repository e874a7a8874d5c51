"""Workers that compare.py and gpu.py measure, each a process of its own: our engine, llama.cpp, transformers.

They must not know each other, nor who measures them and why.
"""
