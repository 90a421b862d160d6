"""Embedding models behind the gateway: which there are, and vectors for token ids."""
