"""Keys and tokens: who calls, as what they send says. Not constructed where no store is set.

What a caller may use belongs to `limits/`.
"""
