"""One module per family of requests, each with `cases(target, chance)`.

Sending them and judging the answers belongs to `fuzz/` itself.
"""

import importlib
import pkgutil

from tests.faults.fuzz.base import Family

NAMES = [module.name for module in pkgutil.iter_modules(__path__)]
FAMILIES: dict[str, Family] = {name: importlib.import_module(f"{__name__}.{name}").cases for name in NAMES}
