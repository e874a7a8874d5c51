"""The command lines of the training commands. No torch: each --help loads this.

They must not do work.
"""
