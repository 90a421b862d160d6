"""What requests say: lengths, prompts, shared prefixes, conversations, traces."""
