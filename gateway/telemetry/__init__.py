"""What the gateway tells about itself: metrics, traces, an access log, what holds the event loop. It decides nothing.

What callers are billed for belongs to `callers/usage/`.
"""
