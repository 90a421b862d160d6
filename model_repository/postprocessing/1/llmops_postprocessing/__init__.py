"""The code of the detokenizer model.

The package runs inside Triton and imports only numpy, tokenizers and the tensor contract. The
gateway does not use this model; it detokenizes in `gateway/text/`.
"""
