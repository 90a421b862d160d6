"""Recipes: ready plans for models that many people serve, each number with its source.

A recipe is a file of `data/` that `llmops build --plan` takes as it is.
"""
