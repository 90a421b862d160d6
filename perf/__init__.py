"""Load generator, scenarios, reports, and benchmarks against peers."""
