"""The entry point of the `llmops` command.

The entry point is a module beside the package `llmops`, because another distribution on PyPI, which
is called `llmops`, has a package of the same name. If that distribution is installed over this
package, or in front of a checkout, the package `llmops` cannot be imported.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `llmops` command, or say how to repair an overwritten installation."""
    try:
        from llmops.cli.main import main as run
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "llmops":
            raise
        pip = f"{sys.executable} -m pip"
        sys.exit(
            "Error: The Python package `llmops` does not belong to llmops-triton: another distribution, most likely "
            f"one named llmops, has overwritten it. Remove it with `{pip} uninstall llmops`, then install "
            f"llmops-triton again with `{pip} install --force-reinstall --no-deps` and the checkout or wheel that "
            "it came from."
        )
    run()
