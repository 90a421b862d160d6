"""May they: requests, tokens and money per caller, reserved before the work and settled to what it was.

`buckets` is the arithmetic, `embedded` and `redis` keep it for workers and gateways, `gate` is what a request meets.
"""
