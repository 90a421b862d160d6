"""Recipes: ready build plans for well-known models, each number with its source.

A recipe is a file of `data/` that `llmops build --plan` accepts.
"""
