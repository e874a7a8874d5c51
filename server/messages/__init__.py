"""Anthropic's Messages API, as another form of a chat.

It must not know running engines.
"""
