"""May they: requests, tokens and money per caller, reserved before the work and settled to what it was.

`buckets` is the arithmetic, `memory` and `redis` keep it for one gateway and for several, `gate` is what a request meets.
"""
