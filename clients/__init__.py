"""HTTP clients: a terminal chat and a load generator. They know the wire and nothing of the server's insides."""
