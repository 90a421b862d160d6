"""Engine -> Triton model repository, and the server on it. The models themselves run inside Triton."""
