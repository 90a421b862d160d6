"""Between text and tokens: tokenizer, chat template, incremental detokenizer, stop strings. Knows no wire format."""
