"""Where a request goes: pure functions and tables, without a clock or an event loop of their own.

When it goes belongs to `admission/`.
"""
