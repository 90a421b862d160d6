"""The tokenizer model's own code. Runs inside Triton: imports numpy and tokenizers only."""
