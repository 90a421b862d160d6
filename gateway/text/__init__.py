"""Tokens ↔ text: tokenizers, chat templates, incremental detokenising, stop strings, and the
threads for long ones.

What a text means (tool calls, reasoning) belongs to `generation/parsers/`.
"""
