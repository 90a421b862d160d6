"""What `key`, `tenant`, `price` and `usage` share."""
