"""The tokenizer model's own code.

Runs inside Triton: imports numpy, tokenizers and the tensor contract only.

The gateway tokenises by itself: `gateway/text/`.
"""
