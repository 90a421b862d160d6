"""The tests have no package, so that two checkouts can run them at once: their helper is loaded by path."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("tool_texts", Path(__file__).with_name("tool_texts.py"))
_helper = sys.modules["tool_texts"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_helper)
