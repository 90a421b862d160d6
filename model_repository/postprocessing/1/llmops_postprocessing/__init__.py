"""The detokenizer model's own code. Runs inside Triton: imports numpy and tokenizers only."""
