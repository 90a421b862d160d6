"""Guided output: the guide that a request asks for, and checks that the engine can enforce it.

The package `grammar/` writes the grammars, and the engine model compiles them.
"""
