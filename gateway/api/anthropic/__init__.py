"""Anthropic's API: messages become the chat request that means the same, answers become its blocks
and events.
"""
