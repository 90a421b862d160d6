"""Generation of text from a checked request: prompt, sampling, guide, tool calls and choices.

The package works on `interfaces.Engine` and depends on neither HTTP nor Triton. The package `api/`
renders the bytes of an answer.
"""
