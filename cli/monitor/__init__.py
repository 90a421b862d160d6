"""`llmops top`: what gateways and engines say about themselves at /metrics, as one screen.

What is measured belongs to `gateway/telemetry/` and to the engine model.
"""
