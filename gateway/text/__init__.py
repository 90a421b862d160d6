"""Conversion between tokens and text.

The package has tokenizers, chat templates, incremental detokenizing, stop strings, and the threads
for long texts.

What a text means (tool calls, reasoning) belongs to `generation/parsers/`.
"""
