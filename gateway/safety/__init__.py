"""Filters that examine prompts and answers, and the consequences of their findings.

A filter assigns a category to a harmful text (`filters`, `rules`, `services`). A policy determines
which filters apply to a tenant's requests (`policy`). A stream guard applies filters to the text of
a running answer (`stream_guard`). All of this is off by default.
"""
