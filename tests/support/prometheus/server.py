"""Debian's Prometheus on a free port, with rules that do not take minutes."""

import contextlib
import json
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmops.errors import ServerError
from tests.support.debian_packages import program
from tests.support.servers import free_port
from tests.support.stack import process

# seconds: what minutes become for the rules' windows and patience, and how often targets are asked and rules evaluated
WINDOW, PATIENCE, TICK = 5, 2, 1
READY_SECONDS = 60.0


def shortened(rules: str) -> str:
    """The same rules with other windows and patience; nothing else changes."""
    content = yaml.safe_load(rules)
    for group in content["groups"]:
        group["interval"] = f"{TICK}s"
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[\d+[smh]\]", f"[{WINDOW}s]", rule["expr"])
            if "for" in rule:
                rule["for"] = f"{PATIENCE}s"
    return yaml.safe_dump(content)


@dataclass(frozen=True)
class Prometheus:
    """`url` of one that runs."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples of an instant query. Raises ServerError with what Prometheus says against it."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"}

    def wait(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        """Raises ServerError if it does not come true in time."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise ServerError(f"Prometheus did not see within {seconds:.0f} s: {what}. Firing: {self.firing()}")
            time.sleep(TICK / 2)

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise ServerError(f"Prometheus refuses {parameters}: {error.read().decode()}") from error


@contextlib.contextmanager
def prometheus(targets: Mapping[str, Sequence[str]], rules: Sequence[Path]) -> Iterator[Prometheus]:
    """One that scrapes `targets` (HOST:PORT, by job) and evaluates `rules`, shortened."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in rules:
            (folder / path.name).write_text(shortened(path.read_text()))
        configuration = {
            "global": {"scrape_interval": f"{TICK}s", "scrape_timeout": f"{TICK}s", "evaluation_interval": f"{TICK}s"},
            "rule_files": [str(folder / path.name) for path in rules],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                for job, addresses in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        url = f"127.0.0.1:{free_port()}"
        command = [
            *program("prometheus", "prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={url}",
        ]
        with process(command, r"(Server is ready to receive web requests)"):
            yield Prometheus(f"http://{url}")
