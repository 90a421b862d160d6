"""`llmops top`: what gateways and engines say of themselves at /metrics, as one screen."""
