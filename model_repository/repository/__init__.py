"""What a model repository is: its config.pbtxt files, the marker with its engines, and whether this machine can run it.

Making one from engines is `generate`; what a build target adds is in `targets/`.
"""
