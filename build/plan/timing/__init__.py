"""Durations of single GPU operations, from tables measured on silicon or from the roofline model.

The operations of a step belong to `speed/`.
"""
