"""A client of a stream that comes back after the last event that it saw."""

import asyncio
import json

import httpx

from tests.support.waiting import GENEROUS

CHAT, OPENAI, RESPONSES = "/api/chat/completions", "/v1/chat/completions", "/v1/responses"


class ResumingReader:
    """A client of one stream that comes back after the last event that it saw."""

    def __init__(self, question: str, path: str = CHAT, **fields) -> None:
        self.body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "stream": True, **fields}
        self.path, self.run, self.last, self.text = path, "", "", ""
        self.ended: dict | None = None
        self.raw: list[str] = []

    async def read(self, client: httpx.AsyncClient, events: int | None = None) -> None:
        """Read some events, or all."""
        event_id = ""
        async with self._ask(client) as response:
            if response.status_code == 503 and self.run:
                # as clients do: they come back later
                await asyncio.sleep(0.1)
                return
            if response.status_code != 200:
                raise AssertionError((response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: {"):
                    # the id of an event that a cut left without data was not seen
                    self.last = event_id
                    self.raw.append(line)
                    self._hear(json.loads(line[6:]))
                    if events is not None and len(self.raw) >= events:
                        return

    async def whole(self, client: httpx.AsyncClient) -> str:
        """Read to the end at one gateway."""
        while self.ended is None:
            await self.read(client)
        return self.text

    def _ask(self, client: httpx.AsyncClient):
        headers = {"x-llmops-resume": "true"}
        if not self.run:
            return client.stream("POST", self.path, json=self.body, headers=headers, timeout=GENEROUS)
        headers["last-event-id"] = self.last
        return client.stream("GET", f"{self.path}/{self.run}", headers=headers, timeout=GENEROUS)

    def _hear(self, event: dict) -> None:
        self.run = event.get("id", self.run)
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                self.ended = event


class BackgroundReader(ResumingReader):
    """A client of a response in the background that comes back after the last event that it saw."""

    def __init__(self, question: str, **fields) -> None:
        super().__init__(question, RESPONSES)
        self.body = {"model": "tiny", "input": question, "background": True, "stream": True, **fields}

    def _ask(self, client: httpx.AsyncClient):
        if not self.run:
            return super()._ask(client)
        query = {"stream": "true", **({"starting_after": self.last} if self.last else {})}
        return client.stream("GET", f"{self.path}/{self.run}", params=query, timeout=GENEROUS)

    def _hear(self, event: dict) -> None:
        self.last = str(event["sequence_number"])
        if event["type"] == "response.created":
            self.run = event["response"]["id"]
        elif event["type"] == "response.output_text.delta":
            self.text += event["delta"]
        elif event["type"] in ("response.completed", "response.incomplete", "response.failed"):
            usage = event["response"]["usage"] or {}
            counts = {"completion_tokens": usage.get("output_tokens")}
            self.ended = {"status": event["response"]["status"], "usage": counts}
