"""Request bodies as clients send them (pydantic, strict, null tolerated everywhere) and the answers' static shapes."""
