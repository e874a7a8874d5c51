"""The plain values that cross rooms and processes: settings, parameters, messages, events, errors.

No torch, no text, no decisions.
"""
