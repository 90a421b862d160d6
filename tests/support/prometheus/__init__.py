"""A real Prometheus with the rules of deploy/, for tests of alerts and dashboards."""
