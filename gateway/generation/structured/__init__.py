"""Guided output: the guide that a request asks for, and checks that the engine can enforce it.

The grammars themselves belong to `grammar/`; compiling them to the engine model.
"""
