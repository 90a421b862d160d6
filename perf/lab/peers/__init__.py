"""Other projects, run side by side from their public wheels, each in an environment of its own.

Only what is measured against them; our own parts are measured in `benchmarks/`.
"""
