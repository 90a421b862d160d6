"""Engine folders to a Triton model repository (`generate`), and the real Triton on it (`launch`).

The folders with a `1/` are the models as Triton sees them: they run inside Triton and import nothing from here.
"""
