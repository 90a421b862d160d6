"""Which guide a request asks for, and whether the engine can keep to it.

The grammars themselves belong to `grammar/`; compiling them to the engine model.
"""
