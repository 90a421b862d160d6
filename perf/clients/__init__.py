"""How requests travel: OpenAI over HTTP, Triton over gRPC. One `Client` interface, one `Record` per request."""
