"""From a checked request to the text of its answer: prompt, sampling, guides, tool calls, choices.

Works on `messages.Engine` and knows neither HTTP nor Triton; the bytes of an answer are written by
`endpoints/`.
"""
