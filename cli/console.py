"""Where commands print their tables."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def table_console(piped: int, *, markup: bool = True) -> Console:
    """Standard output. A pipe has no width, and what is cut there would be noticed by nobody: it is `piped` wide."""
    from rich.console import Console

    has_none = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, markup=markup, width=piped if has_none else None)
