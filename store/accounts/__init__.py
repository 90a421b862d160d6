"""Tenants, users, and the API keys of users. Every change is recorded in the audit log.

A tenant pays; a user belongs to one tenant permanently; a key belongs to a user. Rotating a key
keeps its id, limits and budget. During the overlap, the old and the new secret both belong to the
key.
"""
