"""Load generator, reports and benchmarks: what a deployment does, measured from outside."""
