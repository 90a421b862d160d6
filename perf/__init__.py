"""Load generator, verification, simulator and their reports: deployments measured from outside.

Benchmarks of this project itself belong to `lab/`, which is not part of the wheel.
"""
