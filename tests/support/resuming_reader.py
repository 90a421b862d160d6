"""A client of a stream that comes back after the last event that it saw."""

from __future__ import annotations

import json

import httpx

from tests.support.waiting import GENEROUS

CHAT, OPENAI = "/api/chat/completions", "/v1/chat/completions"


class ResumingReader:
    """A client of one stream that comes back after the last event that it saw."""

    def __init__(self, question: str, path: str = CHAT, **fields) -> None:
        self.body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "stream": True, **fields}
        self.path, self.run, self.last, self.text = path, "", "", ""
        self.ended: dict | None = None
        self.raw: list[str] = []

    async def read(self, client: httpx.AsyncClient, events: int | None = None) -> None:
        """Read some events, or all."""
        headers = {"x-llmops-resume": "true"}
        if self.run:
            headers["last-event-id"] = self.last
            asked = client.stream("GET", f"{self.path}/{self.run}", headers=headers, timeout=GENEROUS)
        else:
            asked = client.stream("POST", self.path, json=self.body, headers=headers, timeout=GENEROUS)
        async with asked as response:
            if response.status_code != 200:
                raise AssertionError((response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    self.last = line[4:]
                elif line.startswith("data: {"):
                    self.raw.append(line)
                    event = json.loads(line[6:])
                    self.run = event.get("id", self.run)
                    for choice in event.get("choices", ()):
                        self.text += choice["delta"].get("content") or ""
                        if choice["finish_reason"]:
                            self.ended = event
                    if events is not None and len(self.raw) >= events:
                        return

    async def whole(self, client: httpx.AsyncClient) -> str:
        """Read to the end at one gateway."""
        while self.ended is None:
            await self.read(client)
        return self.text
