"""Texts on disk: prompts, conversations, answers, and the segmented data set.

It must not know models; no torch but for tensors on disk.
"""
