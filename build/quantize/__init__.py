"""Quantisation with NVIDIA ModelOpt: formats, calibration, export, and reading the export back."""
