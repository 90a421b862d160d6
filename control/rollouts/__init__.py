"""Roll-outs: versions of a model, the steps from one to the next, and the judge of a canary.

The judge and the comparison of qualities are pure: they read no clock and no socket.
"""
