"""Keys: who calls, as what they send says. Not constructed where no store is set."""
