"""Compute durations of engine steps, and the latency and throughput of replicas.

Batches, queues and disaggregation are modelled.

The duration of a single GPU operation belongs to `timing/`.
"""
