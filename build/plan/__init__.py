"""Memory, sharding, speed and cost of a model on a fleet: what `llmops plan` prints and `build` obeys."""
