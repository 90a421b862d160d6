"""Search for the cheapest deployment that meets a request.

The speed of one layout belongs to `speed/`.
"""
