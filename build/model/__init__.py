"""Architectures of models, read from config.json without weights, and the supported families.

The files of a checkpoint belong to `checkpoint/`.
"""
