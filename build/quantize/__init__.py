"""Quantisation with NVIDIA ModelOpt: calibration, export, and reading exports back.

The table of formats is `build/quant_formats.py`; the quality gate belongs to `quality/`.
"""
