"""What was asked for, and which of the candidates answers it at the least cost.

How fast one candidate is belongs to `speed/`.
"""
