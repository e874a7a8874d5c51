"""A trained checkpoint -> a folder to serve, calibrated and described.

It must not know runs in progress.
"""
