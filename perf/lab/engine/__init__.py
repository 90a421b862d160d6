"""The bare OpenVINO engine, without Triton or gateway: as it is served, and with other weights and properties.

The whole path around an engine is measured in `benchmarks/`.
"""
