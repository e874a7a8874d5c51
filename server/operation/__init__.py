"""What operators see and need: metrics, logs, connections, and the supervision of engines.

It must not know routes, nor the text of requests and answers.
"""
