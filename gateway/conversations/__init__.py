"""Answers that outlive their request.

The package has the Responses API's store, its background runs, and the streams that follow them.
How an answer is generated belongs to `generation/`.
"""
