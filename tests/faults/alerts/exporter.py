"""Metrics that no process of the stack has: those of evaluations, which the node exporter reads from a file, and of a
ledger. One HTTP server serves whatever it is given."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.pages import Page, PageServer


class Told:
    """`values`: what each series is, by its name with its labels."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.address = ""

    def page(self) -> str:
        return "".join(f"{name} {value}\n" for name, value in self.values.items())


@contextmanager
def told() -> Iterator[Told]:
    """Serve the exporter on a free port."""
    what = Told()

    kind = {"content-type": "text/plain; version=0.0.4"}
    with PageServer(lambda _: Page(what.page(), headers=kind)) as server:
        what.address = server.address
        yield what
