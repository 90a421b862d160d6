"""How requests travel: OpenAI over HTTP, Triton over gRPC. One `Client` interface, one `Record` per request.

When they leave belongs to `load/`, what they say to `workloads/`.
"""
