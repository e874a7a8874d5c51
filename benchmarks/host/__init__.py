"""The machine that is measured, and the servers and browsers on it."""
