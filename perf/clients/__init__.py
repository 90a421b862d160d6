"""Clients of the load generator: OpenAI over HTTP, and Triton over gRPC.

All clients implement `Client` and return one `Record` per request. `load/` decides when requests
are sent, `workloads/` what they contain.
"""
