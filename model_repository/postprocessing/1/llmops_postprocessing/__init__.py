"""The detokenizer model's own code.

Runs inside Triton: imports numpy, tokenizers and the tensor contract only.

The gateway detokenises by itself: `gateway/text/`.
"""
