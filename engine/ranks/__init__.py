"""The processes beside an engine whose model is split: started, met, led and watched.

It must not know requests or text.
"""
