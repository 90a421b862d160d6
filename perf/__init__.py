"""Load generator, verification, simulator and their reports.

The package measures deployments from outside. The benchmarks of this project itself are in `lab/`,
which is not part of the wheel.
"""
