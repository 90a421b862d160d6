"""`make mutate`: small faults put into the pure modules, and which of them their own tests notice."""
