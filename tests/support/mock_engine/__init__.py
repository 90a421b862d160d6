"""A Triton model that emits tokens at a set pace: what is left to measure is the gateway, gRPC and Triton.

It is the project's own engine model with the runtime exchanged, so requests are parsed and answered by the code that
serves real engines, over the real Triton.
"""
