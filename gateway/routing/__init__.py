"""Which models there are, whether they are ready, and who waits for them.

How one is talked to belongs to `triton/`.
"""
