"""The engines: one module per runtime behind `runtime.EngineRuntime`."""
