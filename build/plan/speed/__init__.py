"""How long a step takes and what a server does with it: batches, queues, prefill apart from decode."""
