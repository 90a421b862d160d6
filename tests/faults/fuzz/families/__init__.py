"""One module per family of requests, each with `cases(target, chance)`.

Sending them and judging the answers belongs to `fuzz/` itself.
"""

import importlib
import pkgutil

from tests.faults.fuzz.base import Family

FAMILIES: dict[str, Family] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").cases for module in pkgutil.iter_modules(__path__)
}
