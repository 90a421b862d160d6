"""One module per library that generates, behind `engine_runtime.EngineRuntime`, and what they
share.
"""
