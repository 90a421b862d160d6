"""A pytest plugin: xdist's groups stay together, and a test run goes on when one of its workers dies.

xdist 3.8 writes the group of a test into its node id in a way that pytest 9.2 does not read: every
worker would start the servers of every group. It also waits for good after a worker of
`--dist loadgroup` died. A native library that crashes must cost one test, with the stacks of its
threads in the summary, and not the run.
"""

import faulthandler
import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

from tests.support.event_loop_lag import report_folder


class RestartingScheduler(LoadGroupScheduling):
    """xdist's scheduler of groups, with the bookkeeping that a replaced worker needs."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Forget the finished tests of a dead worker, which would be handed on as groups without a test."""
        groups = self.assigned_work[node].items()
        self.assigned_work[node] = {scope: tests for scope, tests in groups if not all(tests.values())}
        return super().remove_node(node)

    def mark_test_pending(self, item: str) -> None:
        """Do nothing: `remove_node` has put the test back into the queue."""

    def schedule(self) -> None:
        """Schedule twice for a replacement: a worker begins a test only when it has the next one."""
        begun = self.collection is not None
        super().schedule()
        if begun:
            super().schedule()

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker more tests, unless it is still collecting."""
        if node in self.registered_collections:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RestartingScheduler | None:
    return RestartingScheduler(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Append `@GROUP` to the node ids that a worker reports, by which the scheduler keeps a group together."""
    if not hasattr(config, "workerinput") or not config.getoption("loadgroup", False):
        return
    for item in items:
        groups = sorted({mark.args[0] for mark in item.iter_markers("xdist_group")})
        suffix = f"@{'_'.join(groups)}"
        if groups and not item.nodeid.endswith(suffix):
            item._id = type(item._id).parse(item.nodeid + suffix)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a worker that dies write the stacks of its threads to a file, as its output is lost."""
    if hasattr(session.config, "workerinput"):
        faulthandler.enable((report_folder() / f"died-{os.getpid()}").open("w"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why a worker died, and the stack of the thread whose fault it was."""
    for died in report_folder().glob("died-*"):
        why, *stacks = died.read_text().split("\n\n")
        for stack in stacks:
            if stack.startswith("Current thread"):
                terminalreporter.write_line("\n".join([why, *stack.splitlines()[:20]]))
