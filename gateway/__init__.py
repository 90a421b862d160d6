"""OpenAI requests → Triton gRPC streams. Here: the application, its settings, and what crosses its rooms' borders."""
