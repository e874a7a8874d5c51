"""Text: tokenizers, chat templates, detokenizing, stop strings, tokens that an answer may be made of.

It must not know tensors, slots or scheduling.
"""
