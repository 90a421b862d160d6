"""The screen of `llmops top`, from the metrics pages of gateways and engines.

The metrics themselves belong to `gateway/telemetry/` and to the engine model.
"""
