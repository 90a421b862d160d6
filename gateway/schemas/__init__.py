"""Pydantic models of requests and responses.

Several layers read the models of requests. The API reference shows both.
"""
