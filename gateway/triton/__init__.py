"""The client side of the tensor contract: requests, streams and messages of one server.

The contract is described in docs/contract.md.

The choice among several servers belongs to `routing/`.
"""
