"""How long a step takes and what a server makes of it: batches, queues, prefill apart from decode.

How long a single operation takes on a GPU belongs to `timing/`.
"""
