"""Usage under fire: requests while everything that carries their bill is killed; then the books are checked.

Replicas that are killed under their streams are in `kills/`.
"""
