"""The code of the tokenizer model.

The package runs inside Triton and imports only numpy, tokenizers and the tensor contract. The
gateway does not use this model; it tokenizes in `gateway/text/`.
"""
