"""What clients see of a replica that is killed, stopped or restarted under their streams.

What becomes of their bills when everything else is killed is in `chaos/`.
"""
