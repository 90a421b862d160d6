"""Answers that outlive their request: the Responses API's store, its background runs and what
follows on them.

How an answer is generated belongs to `generation/`.
"""
