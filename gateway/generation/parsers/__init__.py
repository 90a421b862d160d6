"""Incremental parsers of a model's text, which find content, reasoning and tool calls.

`families/` has a module for each format of tool calls. The package `api/` renders tool calls in the
form of an API.
"""
