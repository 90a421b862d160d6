"""Read architectures of models from config.json, without weights, and list the supported families.

The files of a checkpoint belong to `checkpoint/`.
"""
