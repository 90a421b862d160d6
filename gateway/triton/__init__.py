"""The client side of the tensor contract: the requests, streams and messages of one Triton server.

docs/contract.md describes the contract. `routing/` chooses among several servers.
"""
