"""What `make bench` measures: one script per subject, each runnable by itself.

What scripts share is in `harness/`; other programs that are measured beside ours are in `peers/`.
"""
