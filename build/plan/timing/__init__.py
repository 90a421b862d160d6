"""Compute durations of single GPU operations, from measured tables or the roofline model.

The operations of a step belong to `speed/`.
"""
