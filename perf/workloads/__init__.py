"""The contents of requests: lengths, prompts, shared prefixes, conversations and traces.

`load/` decides when requests are sent.
"""
