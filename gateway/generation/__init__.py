"""Generation: prompt, sampling, guides, tool calls and choices, from a checked request to its text.

The package works on `interfaces.Engine` and knows neither HTTP nor Triton. The bytes of an answer
are written by `api/`.
"""
