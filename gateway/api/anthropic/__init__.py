"""Anthropic's Messages API, converted to and from chat completions.

A messages request becomes the equivalent chat request, and the answer becomes Anthropic's content
blocks and events.
"""
