"""Clients of a gateway until they are told to stop: some stay, some leave, some begin all prompts alike."""

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
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


def _ask(address: str, model: str, habits: Habits, number: int, over: threading.Event) -> None:
    for asked in count(1):
        if over.wait(PAUSE):
            return
        own = f"{number}.{asked} "
        text = SYSTEM + own if habits.alike else own * 60 + SYSTEM
        body = {"model": model, "prompt": text, "max_tokens": 2, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection(address, timeout=60)
        # some faults take the server away
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if not (habits.leaving and asked % 3):
                response.read()


@contextmanager
def clients(url: str, model: str, number: int) -> Iterator[Habits]:
    """`number` of them; their habits may be changed at any time."""
    habits, over, address = Habits(), threading.Event(), urlsplit(url).netloc
    with ThreadPoolExecutor(number) as pool:
        for at in range(number):
            pool.submit(_ask, address, model, habits, at, over)
        try:
            yield habits
        finally:
            over.set()
