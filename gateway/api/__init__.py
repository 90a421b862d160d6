"""One module per API: read the body, ask for the answer, write it in the form that the client speaks.

How an answer comes about belongs to `answers/`; what may be in a body to `openai/`.
"""
