"""Anthropic's API, translated to and from chat completions.

Messages become the equivalent chat request, and the answer becomes Anthropic's content blocks and
events.
"""
