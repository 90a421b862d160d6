"""The admin API: the schemas of its bodies, and its routes.

Callers read their own usage through another API, `control/usage_api.py`.
"""
