"""Guided decoding for libraries whose own implementation can block or crash the engine.

A separate process first compiles and tries each grammar.
"""
