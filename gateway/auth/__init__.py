"""Authentication: API keys and tokens, and the caller that they name.

The gateway asks for keys only if the settings have a `store` or `oidc`.

What a caller may use belongs to `ratelimit/`.
"""
