"""Compute layouts of models over GPUs, and the memory of weights, KV cache and buffers.

Durations belong to `timing/` and `speed/`.
"""
