"""HTTP: connections, bodies, event streams, errors, request contexts and checks.

Nothing here knows a model, and of an API only the format of its errors.
"""
