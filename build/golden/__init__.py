"""Golden answers: what the source checkpoint says, greedily, to a few prompts. engine.json keeps them for `verify`."""
