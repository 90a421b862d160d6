"""Guided decoding where the engine has none that is safe: grammars compiled and tried in a process of their own."""
