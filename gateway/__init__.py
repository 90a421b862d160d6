"""OpenAI requests -> Triton gRPC token streams."""
