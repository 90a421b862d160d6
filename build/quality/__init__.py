"""Measure the quality of quantised models against the source, and apply quality gates.

The quantisation itself belongs to `quantize/`.
"""
