"""Tenants, their users and the users' keys. Everything that changes one is in the audit log.

A tenant pays; a user belongs to one tenant permanently; a key belongs to a user. A key keeps its id, limits and budget
when it is rotated: for the time of the overlap two secrets are the same key.
"""
