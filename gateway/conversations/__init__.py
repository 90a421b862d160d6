"""Conversations and responses that outlive their request.

The package has the store of conversations, the Responses API's store with its background runs, and
the streams that follow running answers. The generation of an answer belongs to `generation/`.
"""
