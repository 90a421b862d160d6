"""Clients: OpenAI over HTTP, Triton over gRPC. One `Client` interface, one `Record` per request.

`load/` decides when requests are sent, `workloads/` what they contain.
"""
