"""Guided output: the guide of a request, and checks that the engine can enforce the guide.

The package `grammar/` writes grammars, and the engine model compiles them.
"""
