"""What a gateway worker knows of the others on its port."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Siblings:
    """`own` is the Unix socket where the others reach this worker, `others` where it reaches them.

    `responses` is the database that they share; without others it is memory.
    """

    own: str = ""
    others: tuple[Path, ...] = ()
    responses: str = ":memory:"


ALONE = Siblings()


def crew(folder: Path, count: int) -> list[Siblings]:
    """The places of `count` workers that share `folder`."""
    sockets = [folder / f"{index}.sock" for index in range(count)]
    database = str(folder / "responses.db")
    return [Siblings(str(own), tuple(one for one in sockets if one != own), database) for own in sockets]
