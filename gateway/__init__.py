"""OpenAI requests -> Triton gRPC streams. Here: the application, its settings, and what crosses its rooms' borders.

Whatever is of one room alone belongs into that room.
"""
