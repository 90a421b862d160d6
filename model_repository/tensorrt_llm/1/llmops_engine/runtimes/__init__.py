"""The libraries that generate: one module per runtime behind `runtime.EngineRuntime`.

What is the same for all of them belongs to `loop.py`.
"""
