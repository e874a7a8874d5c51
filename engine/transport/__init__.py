"""What crosses between processes: frames on a socket pair, and how a process begins and ends.

No torch; it must not know what the messages mean.
"""
