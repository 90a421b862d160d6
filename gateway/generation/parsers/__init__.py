"""Parsers of a model's text: content, reasoning and tool calls, piece by piece.

`families/` has a module per format of tool calls. How an API writes a tool call belongs to `api/`.
"""
