"""The parts of a model repository: its config.pbtxt files, the manifest of its engines, and the
checks of both.
"""
