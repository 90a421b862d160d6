"""From a checked request to the text of its answer: prompt, sampling, guides, tool calls, choices.

Works on `interfaces.Engine` and knows neither HTTP nor Triton. The bytes of an answer are written by
`api/`.
"""
