"""A Triton model that emits tokens at a set pace, so that what remains to measure is the gateway, gRPC and Triton.

The mock engine is the project's own engine model with another runtime: the code that serves real engines parses and
answers the requests, on the real Triton.
"""
