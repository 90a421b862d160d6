"""The OpenAI wire: request and response types, SSE, tools, structured output. Knows nothing of Triton."""
