"""Filters that examine prompts and answers, and the consequences of a finding.

A filter names a category for a text (`filters`, `rules`, `services`); a policy says which filters a
tenant's requests meet (`policy`); a stream guard applies them to the text of a running answer
(`stream_guard`). All of it is off by default.
"""
