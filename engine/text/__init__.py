"""Text: tokenizers, chat templates, detokenizing, grammars.

It must not know tensors, slots or scheduling.
"""
