"""What the gateway's tests serve it with, for those of a fleet of real engines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if "gateway_conftest" not in sys.modules:
    _path = Path(__file__).parents[1] / "gateway" / "conftest.py"
    _spec = importlib.util.spec_from_file_location("gateway_conftest", _path)
    sys.modules["gateway_conftest"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["gateway_conftest"])
from gateway_conftest import eventually, eventually_async, serving

__all__ = ["eventually", "eventually_async", "serving"]
