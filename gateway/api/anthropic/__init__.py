"""Anthropic's API: its messages become the chat request that means the same, answers become its blocks and events.

How its errors look is in `http/anthropic.py`, as every layer may have one to tell.
"""
