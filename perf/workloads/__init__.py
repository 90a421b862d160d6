"""What requests say: lengths, prompts, shared prefixes, conversations, traces.

When they are sent belongs to `load/`.
"""
