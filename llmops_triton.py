"""The entry point of the `llmops` command.

It is a module beside the package `llmops`, because PyPI's distribution `llmops`, which is not ours,
brings a package of the same name. Installed over ours or in front of a checkout, it leaves a
package that cannot be imported.
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
            "Error: The Python package `llmops` is not that of llmops-triton: another distribution, most likely one "
            f"named llmops, has overwritten it. Remove it with `{pip} uninstall llmops`, then install llmops-triton "
            f"again with `{pip} install --force-reinstall --no-deps` and the checkout or wheel that it came from."
        )
    run()
