"""ASGI matters that no endpoint should care about: bodies and their limits, disconnects, headers, event streams."""
