"""compare.py: contestants in processes of their own, the requests that they are asked, and figures, ratios and tables.

It must not know what a worker computes: it starts the modules of peers/ and reads their lines.
"""
