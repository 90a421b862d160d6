"""The engine runtimes: one module per library that generates, and shared code.

Each runtime implements `engine_runtime.EngineRuntime`.
"""
