"""What a model is: its architecture, read from a config without loading weights, and the families that are known.

Which files a checkpoint has belongs to `checkpoint/`.
"""
