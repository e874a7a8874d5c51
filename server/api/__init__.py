"""What all endpoints share, from a body to the answer that is sent; and the endpoints that generate nothing.

It must not know processes, ports or replicas, nor the form of an API's answers.
"""
