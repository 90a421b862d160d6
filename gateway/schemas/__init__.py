"""Pydantic models of requests and responses in OpenAI's, Cohere's and our own wire formats."""
