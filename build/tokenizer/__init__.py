"""Write the tokenizer folder of an engine: tokenizer.json, its config and the chat template.

Tokenising and rendering requests belong to `gateway/text/`.
"""

from llmops.build.tokenizer.tokenizer_folder import check_tokenizer, write_tokenizer

__all__ = ["check_tokenizer", "write_tokenizer"]
