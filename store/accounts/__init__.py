"""Tenants, their users and the users' keys. Every change is in the audit log.

A tenant pays; a user belongs to one tenant permanently; a key belongs to a user. A rotation keeps a
key's id, limits and budget. During its overlap, two secrets belong to the same key.
"""
