"""HTTP connections, request bodies, event streams, errors, request contexts and checks.

Modules here do not depend on models, and depend on APIs only for the formats of their errors.
"""
