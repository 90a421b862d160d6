"""Pydantic models of requests and responses.

Several layers read the requests, and the API reference shows the responses.
"""
