"""Links in a folder that somebody else made: what they lead to would be copied into the engine."""

from __future__ import annotations

import os
from pathlib import Path

from llmops.errors import CheckpointError


def reject_outside_symlinks(folder: Path) -> None:
    """Check that each file and folder in `folder` lies in it, or where the hub's cache keeps contents.

    Raises:
        CheckpointError: A link leads out of the folder. The message names the link and not its target.
    """
    real = folder.resolve()
    allowed = [real]
    # the hub's cache: models--OWNER--NAME/snapshots/REVISION/FILE is a link to ../../blobs/DIGEST
    if real.parent.name == "snapshots":
        allowed.append(real.parents[1] / "blobs")
    for root, folders, files in os.walk(real):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink() and not any(path.resolve().is_relative_to(one) for one in allowed):
                raise CheckpointError(
                    f"{folder} has a link {path.relative_to(real)} that leads out of the folder, so a build would read "
                    "another file of this machine. Copy the file there if it belongs to the checkpoint."
                )
