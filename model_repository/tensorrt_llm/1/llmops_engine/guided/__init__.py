"""Guided decoding for libraries without a safe implementation.

A process of its own compiles and tries each grammar first.
"""
