"""Conversion between tokens and text.

The package has tokenizers, chat templates, incremental detokenization, stop strings, and threads
for long texts. The meaning of a text (tool calls, reasoning) belongs to `generation/parsers/`.
"""
