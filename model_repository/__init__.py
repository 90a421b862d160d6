"""Engine -> Triton model repository, and the real Triton server on it."""
