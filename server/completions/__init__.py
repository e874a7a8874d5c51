"""OpenAI's chat and text completions: their routes, and an answer in their forms, of which other APIs make theirs.

It must not know running engines.
"""
