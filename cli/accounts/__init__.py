"""Options, tables and the admin client that `key`, `tenant`, `price`, `usage` and `audit` share."""
