"""Clients of a gateway until they are told to stop: some stay, some leave, some begin all prompts alike."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

SYSTEM = "You answer in one word. " * 60
PAUSE = 0.1


@dataclass
class Habits:
    """The behaviour of the clients from now on.

    Attributes:
        alike: True if their prompts share a beginning.
        leaving: True if all but every third leave as soon as their answer begins.
    """

    alike: bool = True
    leaving: bool = False


class _Client(threading.Thread):
    def __init__(self, url: str, model: str, habits: Habits, number: int) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._address, self._model, self._habits, self._number = urlsplit(url).netloc, model, habits, number
        self.over = threading.Event()

    def run(self) -> None:
        asked = 0
        while not self.over.wait(PAUSE):
            asked += 1
            try:
                self._ask(asked)
            except (OSError, http.client.HTTPException):
                # some faults take the server away
                continue

    def _ask(self, asked: int) -> None:
        habits = self._habits
        own = f"{self._number}.{asked} "
        text = SYSTEM + own if habits.alike else own * 60 + SYSTEM
        body = {"model": self._model, "prompt": text, "max_tokens": 2, "ignore_eos": True, "stream": True}
        with closing(http.client.HTTPConnection(self._address, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if not (habits.leaving and asked % 3):
                response.read()


@contextmanager
def clients(url: str, model: str, count: int) -> Iterator[Habits]:
    """`count` of them; their habits may be changed at any time."""
    habits = Habits()
    running = [_Client(url, model, habits, number) for number in range(count)]
    for one in running:
        one.start()
    try:
        yield habits
    finally:
        for one in running:
            one.over.set()
        for one in running:
            one.join()
