"""The client side of the tensor contract (docs/contract.md): requests, streams and messages of one
server.

The choice among several servers belongs to `routing/`.
"""
