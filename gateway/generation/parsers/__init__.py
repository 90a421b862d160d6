"""What a model writes -> content, reasoning and tool calls, piece by piece; one module per format
that models use.

How an API writes a tool call belongs to `api/`. `families/` has a module per format of tool calls.
"""
