"""Load generator, verification, simulator and their reports: what a deployment does, measured from outside.

How this project measures itself belongs to `lab/`, which is not part of the wheel.
"""
