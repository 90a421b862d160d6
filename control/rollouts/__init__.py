"""Roll-outs of model versions: the steps from one version to the next, and the canary's judge.

The judge and the comparison of qualities are pure: they use neither clocks nor sockets.
"""
