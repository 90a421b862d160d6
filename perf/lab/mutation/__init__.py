"""`make mutate`: small faults put into the pure modules, and which of them their own tests notice.

Which modules, and which tests are theirs, is in `tests/mutation.yaml`.
"""
