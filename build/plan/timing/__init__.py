"""How long one operation takes on one GPU: from tables measured on silicon, else from the roofline.

Which operations a step has belongs to `speed/`.
"""
