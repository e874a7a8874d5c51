"""What abuse.py sends to a server, and how it judges the answers."""
