"""Triton model repositories: their generation from engine folders, and launches of Triton.

`generate` writes a repository, `launch` starts Triton on it.

The folders with a `1/` hold the code of models. This code runs inside Triton and imports nothing
from this package.
"""
