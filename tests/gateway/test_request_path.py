"""The size of the gateway's code that one plain streamed chat runs through.

`python -m tests.gateway.test_request_path` lists its functions by module.
"""

import asyncio
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from llmops import gateway
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.text.tokenizer import TextTokenizer
from tests.support.gateway_stack import Stack, card_of, serving
from tests.support.scripted_triton import ScriptedTriton
from tests.support.tokenizer_files import write_tokenizer

#: Modules and functions that a reader of this path has to know.
MAX_MODULES, MAX_FUNCTIONS = 35, 170

ROOT = next(iter(gateway.__path__))


class CalledFunctions:
    """The functions of the gateway that run while a profile of all threads is on."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def __enter__(self) -> "CalledFunctions":
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        # comprehensions and generator expressions are part of their function; the monitor of the event
        # loop is a timer, which calls more on a busy machine
        is_monitor = code.co_filename.endswith("event_loop_lag.py")
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name[0] != "<" and not is_monitor:
            self.codes.add(code)


async def called_by_a_chat(tokenizer_dir: Path) -> dict[str, list[str]]:
    """Return the functions that each of three streamed chats calls, by module.

    What also runs without a request is left out.
    """
    tokenizer = TextTokenizer(tokenizer_dir)
    triton = ScriptedTriton(card_of(tokenizer_dir, tokenizer), lambda tensors: [])
    async with triton, serving(GatewaySettings(triton=triton.address, refresh="600s")) as (client, server):
        stack = Stack(triton, client, tokenizer, server)
        stack.say("The quick brown fox jumps over the lazy dog.", wait=0.005)
        await stack.events()
        with CalledFunctions() as idle:
            await asyncio.sleep(0.3)
        chats = [CalledFunctions() for _ in range(3)]
        for chat in chats:
            with chat:
                assert (await stack.events())[-1] == "[DONE]"
                await asyncio.sleep(0.1)
    found: defaultdict[str, list[str]] = defaultdict(list)
    # timers of a busy machine call others in some chats
    called = set.intersection(*(chat.codes for chat in chats)) - idle.codes
    for code in sorted(called, key=lambda code: code.co_firstlineno):
        name: Any = getattr(code, "co_qualname", code.co_name)
        found[str(Path(code.co_filename).relative_to(ROOT))].append(name)
    return found


async def test_a_plain_streamed_chat_is_short(tokenizer_dir: Path) -> None:
    found = await called_by_a_chat(tokenizer_dir)
    functions = sum(map(len, found.values()))
    assert "http/sse.py" in found
    assert (len(found) <= MAX_MODULES, functions <= MAX_FUNCTIONS) == (True, True), (len(found), functions)


def main() -> None:
    """Print the functions of one chat."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(called_by_a_chat(write_tokenizer(Path(folder))))
    for module, names in sorted(found.items()):
        print(f"{module} ({len(names)})", *names, sep="\n    ")
    print(f"{len(found)} modules, {sum(map(len, found.values()))} functions")


if __name__ == "__main__":
    main()
