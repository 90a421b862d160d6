"""The bare OpenVINO engine, without Triton or gateway: as it is served, and with other weights and properties."""
