"""Contents of requests: lengths, prompts, shared prefixes, conversations, traces.

`load/` decides when they are sent.
"""
