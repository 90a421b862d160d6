"""Guided decoding where the engine has none that is safe: grammars compiled and tried in a process of their own.

How a schema becomes a grammar belongs to the gateway: `gateway/generation/structured/grammar/`.
"""
