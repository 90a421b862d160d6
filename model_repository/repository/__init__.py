"""The parts of a model repository.

These are its config.pbtxt files, the manifest of its engines, and the checks of both.
"""
