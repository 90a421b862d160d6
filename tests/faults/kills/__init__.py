"""Kill, stop or restart a replica under its streams, and compare what clients receive with an undisturbed run.

The package `chaos` kills the processes that carry usage.
"""
