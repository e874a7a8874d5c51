"""What this machine can do at best, and what of it a step's parts reach. It must know nothing of requests."""
