"""Durations of engine steps, and the latency and throughput of replicas: batches, queues,
disaggregation.

The duration of a single GPU operation belongs to `timing/`.
"""
