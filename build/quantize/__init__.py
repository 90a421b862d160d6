"""Quantise models with NVIDIA ModelOpt: calibrate, export, and read exports back.

The table of formats is `build/quant_formats.py`. The quality gate belongs to `quality/`.
"""
