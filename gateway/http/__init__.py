"""HTTP: connections, bodies, event streams, errors, the context of a request and the checks around
it.

Nothing here knows a model, and of an API only the format of its errors.
"""
