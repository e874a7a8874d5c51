"""What a step makes of the trunk's states: groups of tokens, and the scores of prompts.

It must not know what computes the states, nor who asked for the tokens.
"""
