"""Pydantic models of requests that several layers read, and of the responses that the API reference
shows.
"""
