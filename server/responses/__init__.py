"""OpenAI's Responses API, as another form of a chat, with a bounded memory of what was answered.

It must not know running engines.
"""
