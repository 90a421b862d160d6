"""Several mock engines as one model on the real Triton, and what is asked of them.

Replicas that are killed belong to `kills/`.
"""
