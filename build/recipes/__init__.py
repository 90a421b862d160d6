"""Recipes: build plans for well-known models, with the source of each number.

A recipe is a file of `data/` that `llmops build --plan` accepts.
"""
