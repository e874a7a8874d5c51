"""The confidence of requests that leave it to the server, from what steps and groups have taken.

It must not know the model, text or HTTP.
"""
