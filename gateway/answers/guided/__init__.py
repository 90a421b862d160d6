"""Which guide a request asks for, and whether the engine can keep to it. The grammars themselves: `grammar/`."""
