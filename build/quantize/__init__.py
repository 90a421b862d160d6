"""Quantisation with NVIDIA ModelOpt: calibration, export, and reading the export back.

Which formats there are is the table in `build/quant_formats.py`; whether the result is good enough belongs to `quality/`.
"""
