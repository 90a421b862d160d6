"""What `key`, `tenant`, `price` and `usage` share: options, tables, and whom they ask.

The operations themselves belong to `control/admin/`.
"""
