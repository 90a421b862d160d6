"""The wire: bodies as clients send them, as Pydantic models that check them.

Nothing here does anything with them; Anthropic's bodies are in `endpoints/messages/`.
"""
