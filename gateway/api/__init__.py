"""The HTTP APIs, one module each.

A module contains an API's routes, reads its requests, and writes its answers in the client's
format.
"""
