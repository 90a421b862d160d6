"""Tokens ↔ text: tokenizers, chat templates, incremental detokenising, stop strings, and the threads for long ones."""
