"""The wire: routes, schemas, streams and errors of the OpenAI-compatible API.

It must not know processes, ports or replicas.
"""
