"""The clients: what each was promised, and what it got."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

# until a request counts as hung
PATIENCE = 60.0


@dataclass
class Asked:
    """One request. `tokens` is how many its answer has; `got`: events with text that came, `prompt` and `completion`:
    the usage that its last event told. `answer_id` is empty where nothing of an answer came; `lost`: how often it was
    tried and its gateway went before there was one.
    """

    tokens: int
    leaves_after: int | None
    answer_id: str = ""
    got: int = 0
    prompt: int | None = None
    completion: int | None = None
    lost: int = 0

    @property
    def done(self) -> bool:
        return self.completion is not None


async def ask_all(
    urls: Sequence[str], keys: Sequence[str], model: str, requests: int, at_once: int, dice: random.Random
) -> list[Asked]:
    """A tenth of them leave midway. One that is refused tries again; one that loses its gateway midway does not."""
    asked = [_plan(dice) for _ in range(requests)]
    waiting = iter(asked)
    async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:

        async def one_by_one() -> None:
            for request in waiting:
                messages = [{"role": "user", "content": "Hello " * dice.randrange(1, 20)}]
                body = {"model": model, "messages": messages, "max_tokens": request.tokens, "stream": True}
                body["stream_options"] = {"include_usage": True}
                headers = {"authorization": f"Bearer {dice.choice(keys)}"}
                while not request.answer_id:
                    try:
                        await _ask(client, dice.choice(urls), body, headers, request)
                    except httpx.HTTPError:
                        request.lost += 1
                        await asyncio.sleep(0.1)

        await asyncio.gather(*(one_by_one() for _ in range(at_once)))
    return asked


def _plan(dice: random.Random) -> Asked:
    tokens = dice.randrange(2, 40)
    return Asked(tokens, dice.randrange(1, tokens) if dice.random() < 0.1 else None)


async def _ask(client: httpx.AsyncClient, url: str, body: dict, headers: dict, request: Asked) -> None:
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            await asyncio.sleep(0.1)
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return
            request.answer_id = event["id"]
            if event.get("usage"):
                request.prompt, request.completion = (event["usage"][f"{of}_tokens"] for of in ("prompt", "completion"))
            elif event["choices"] and event["choices"][0]["delta"].get("content"):
                request.got += 1
                if request.got == request.leaves_after:
                    return
