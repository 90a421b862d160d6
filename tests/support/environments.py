"""Virtual environments that have something more than the one that runs the tests."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def new_environment(folder: Path) -> Path:
    """Return the Python of a new environment, which also has the libraries of this one, pip among them.

    What is installed into it comes before them. A copy of pip and of what is here already would take longer than most
    tests.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    libraries = {
        str(Path(str(found.origin)).parents[1]) for name in ("click", "pip", "xxhash") if (found := find_spec(name))
    }
    (site / "libraries.pth").write_text("\n".join(libraries) + "\n")
    return folder / "bin" / "python"
