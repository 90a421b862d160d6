"""What `make bench` measures: one script per subject, each runnable by itself."""
