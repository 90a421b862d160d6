"""NVIDIA ModelOpt: calibration, quantisation, export."""
