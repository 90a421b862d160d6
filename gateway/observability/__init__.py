"""What the gateway tells about itself: metrics, and what holds the event loop. Measures, and decides nothing.

What callers are billed for belongs to `callers/usage/`.
"""
