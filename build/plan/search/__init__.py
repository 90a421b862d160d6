"""The search for the cheapest deployment that meets a request.

The speed of one candidate belongs to `speed/`.
"""
