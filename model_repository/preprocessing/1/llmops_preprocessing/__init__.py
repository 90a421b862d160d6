"""The tokenizer model's own code.

The package runs inside Triton and imports numpy, tokenizers and the tensor contract only.

The gateway tokenises by itself: `gateway/text/`.
"""
