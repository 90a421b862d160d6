"""Checks of a deployment through its OpenAI API only."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.perf.verify.answers import golden_of, limits
from llmops.perf.verify.findings import Finding, VerifyCheck, WrongError, assume, check, expect, refused, works, wrong
from llmops.response_limits import EVENTS
from llmops.sequences import common_prefix_length

CHECKS: list[VerifyCheck] = []
_CHAT = [{"role": "user", "content": "Name the four seasons of the year in order."}]
_PROMPT = "The capital of France is"
_NEW = 12
_NO_ENGINE = "the engine folder (--engine) and its golden answers are needed"
#: Maximum number of events of a stream, after which a server counts as one that never stops. The
#: longest answer of the checks has 64 tokens.
MAX_EVENTS = 1000


@dataclass
class ApiContext:
    """The deployment under test, and the known properties of its model.

    Attributes:
        http: A client whose base URL ends in /v1.
        model: The name of the model.
        manifest: The manifest of the engine, or None without an engine folder.
        tokenizer: The tokenizer of the engine, or None.
        capabilities: The capabilities that a gateway announces; empty for other servers.
    """

    http: httpx.AsyncClient
    model: str = ""
    manifest: EngineManifest | None = None
    tokenizer: TextTokenizer | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Raise WrongError if the server rejects the request.
        """
        response = await self.http.post(path, json={"model": self.model, **body})
        if response.status_code != 200:
            raise WrongError(f"{path} answers {response.status_code}: {_message(response)}")
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a streamed answer before [DONE]."""
        events: list[str] = []
        request = {"model": self.model, "stream": True, **body}
        async with self.http.stream("POST", path, json=request, extensions=EVENTS) as response:
            if response.status_code != 200:
                await response.aread()
                raise WrongError(f"{path} answers {response.status_code}: {_message(response)}")
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    events.append(line.removeprefix("data:").strip())
                    expect(len(events) <= MAX_EVENTS, f"the stream of {path} has more than {MAX_EVENTS} events")
        expect(events and events[-1] == "[DONE]", f"the stream of {path} does not end with [DONE]")
        return [json.loads(event) for event in events[:-1]]


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


@check(CHECKS, "models")
async def models(api: ApiContext) -> Finding:
    listed = (await api.http.get("/models")).json().get("data") or []
    names = [one["id"] for one in listed]
    api.model = api.model or (names[0] if names else "")
    expect(names, "the gateway lists no model; check that its replicas are ready")
    expect(api.model in names, f"the gateway lists {', '.join(names)}, not {api.model}; name one of these with --model")
    answer = await api.http.get(f"/models/{api.model}")
    api.capabilities = answer.json().get("capabilities") or {} if answer.status_code == 200 else {}
    return works(", ".join(names))


@check(CHECKS, "chat")
async def chat(api: ApiContext) -> Finding:
    answer = await api.post("/chat/completions", messages=_CHAT, max_tokens=_NEW, temperature=0)
    choice = answer["choices"][0]
    expect(isinstance(choice["message"].get("content"), str), "a chat's message has no text")
    expect(choice["finish_reason"] in ("stop", "length"), f"finish_reason is {choice['finish_reason']!r}")
    used = answer["usage"]["completion_tokens"]
    expect(used <= _NEW, f"{used} tokens came although max_tokens is {_NEW}")
    events = await api.stream("/chat/completions", messages=_CHAT, max_tokens=_NEW, temperature=0)
    text = "".join((event["choices"][0]["delta"].get("content") or "") for event in events if event["choices"])
    expect(
        text == choice["message"]["content"], "the text of a streamed chat differs from the same chat without streaming"
    )
    return works(repr(text[:40]))


@check(CHECKS, "completions")
async def completions(api: ApiContext) -> Finding:
    body = {"prompt": _PROMPT, "max_tokens": _NEW, "temperature": 0}
    first, again = await api.post("/completions", **body), await api.post("/completions", **body)
    expect(first["choices"][0]["text"] == again["choices"][0]["text"], "two equal greedy requests get different texts")
    events = await api.stream("/completions", **body, stream_options={"include_usage": True})
    text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    expect(text == first["choices"][0]["text"], "the streamed text differs from the text without streaming")
    usage = events[-1].get("usage")
    expect(usage == first["usage"], f"usage is {usage} when streamed, but {first['usage']} without streaming")
    return works()


@check(CHECKS, "stop string")
async def stop(api: ApiContext) -> Finding:
    body = {"messages": _CHAT, "max_tokens": 2 * _NEW, "temperature": 0}
    text = (await api.post("/chat/completions", **body))["choices"][0]["message"]["content"]
    word = next((word for word in text.split()[2:] if text.index(word) > 0), None)
    assume(word is not None, "the answer is too short for a stop string inside")
    choice = (await api.post("/chat/completions", **body, stop=[word]))["choices"][0]
    expect(
        choice["message"]["content"] == text[: text.index(word)],
        f"the answer does not end before the stop string {word!r}",
    )
    expect(choice["finish_reason"] == "stop", f"finish_reason is {choice['finish_reason']!r} after a stop string")
    return works()


@check(CHECKS, "seed")
async def seed(api: ApiContext) -> Finding:
    body = {"prompt": _PROMPT, "max_tokens": _NEW, "temperature": 2.0}
    texts = [(await api.post("/completions", **body, seed=seed))["choices"][0]["text"] for seed in (5, 5, 6, 7)]
    expect(texts[0] == texts[1], "two requests with the same seed get different texts")
    assume(len(set(texts)) > 1, "all seeds gave the same text")
    return works()


@check(CHECKS, "n choices")
async def choices(api: ApiContext) -> Finding:
    found = await api.post("/completions", prompt=_PROMPT, max_tokens=4, n=2, temperature=1.0)
    indices = sorted(choice["index"] for choice in found["choices"])
    expect(indices == [0, 1], f"a request with n 2 got the choices {indices} instead of [0, 1]")
    return works()


@check(CHECKS, "log-probabilities")
async def log_probs(api: ApiContext) -> Finding:
    body = {"messages": _CHAT, "max_tokens": 4, "temperature": 0, "logprobs": True}
    if api.capabilities.get("logprobs") is False:
        response = await api.http.post("/chat/completions", json={"model": api.model, **body})
        expect(response.status_code == 400, f"logprobs are not announced, yet the answer is {response.status_code}")
        return refused()
    found = (await api.post("/chat/completions", **body))["choices"][0]["logprobs"]["content"]
    scores = [token["logprob"] for token in found]
    expect(scores and all(score <= 1e-4 for score in scores), f"the answer's log-probabilities are {scores}")
    return works()


@check(CHECKS, "JSON schema")
async def schema(api: ApiContext) -> Finding:
    wanted = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": wanted, "strict": True}}
    body = {"messages": _CHAT, "max_tokens": 64, "temperature": 0, "response_format": form}
    if "json_schema" not in api.capabilities.get("guided", ["json_schema"]):
        response = await api.http.post("/chat/completions", json={"model": api.model, **body})
        expect(response.status_code == 400, f"schemas are not announced, yet the answer is {response.status_code}")
        return refused()
    choice = (await api.post("/chat/completions", **body))["choices"][0]
    assume(choice["finish_reason"] != "length", "the answer reached max_tokens before it was complete")
    value = json.loads(choice["message"]["content"])
    expect(value.get("colour") in ("red", "green", "blue"), f"the answer {value} does not follow the schema")
    return works()


@check(CHECKS, "refusals")
async def refusals(api: ApiContext) -> Finding:
    cases: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": -1},
        "max_tokens": {"max_tokens": 0},
        "messages": {"messages": []},
    }
    for name, body in cases.items():
        request = {"model": api.model, "messages": _CHAT, "max_tokens": 2, **body}
        response = await api.http.post("/chat/completions", json=request)
        expect(response.status_code == 400, f"{name} {body[name]!r} gets {response.status_code} instead of 400")
        expect("error" in response.json(), f"{name} {body[name]!r} is refused without OpenAI's error object")
    missing = await api.http.post("/chat/completions", json={"model": "no-such-model", "messages": _CHAT})
    expect(missing.status_code == 404, f"an unknown model gets {missing.status_code} instead of 404")
    return works(f"{len(cases) + 1} requests that cannot be honoured")


@check(CHECKS, "chat template and tokenizer")
async def tokens(api: ApiContext) -> Finding:
    _, golden = golden_of(api.manifest, _NO_ENGINE)
    template = api.tokenizer.chat_template if api.tokenizer else None
    assume("strftime_now" not in (template or ""), "the chat template writes today's date")
    for one in golden.answers:
        messages = [{"role": "user", "content": one.text}]
        given = {"messages": messages, "add_generation_prompt": True} if template else {"prompt": one.text}
        response = await api.http.post(
            str(api.http.base_url).removesuffix("v1/") + "tokenize", json={"model": api.model, **given}
        )
        assume(response.status_code != 404, "this gateway has no /tokenize")
        found = response.json().get("tokens")
        wanted = one.ids if template else one.text_ids
        expect(
            found == wanted, f"{one.text[:40]!r} becomes another prompt than the source's: wrong tokenizer or template"
        )
    return works(f"{len(golden.answers)} chats become the source's token ids")


@check(CHECKS, "greedy answers")
async def greedy(api: ApiContext) -> Finding:
    manifest, golden = golden_of(api.manifest, _NO_ENGINE)
    assert api.tokenizer is not None, "the manifest has golden answers"
    shared = total = 0
    for one in golden.answers:
        ids = [token for token in one.tokens if token not in manifest.tokenizer.end_ids]
        wanted = api.tokenizer.decode(ids)
        body = {"prompt": one.ids, "max_tokens": len(ids), "temperature": 0}
        text = (await api.post("/completions", **body))["choices"][0]["text"]
        shared += common_prefix_length(text, wanted)
        total += len(wanted)
    least = _least_shared(limits(manifest, sum(len(one.tokens) for one in golden.answers))[0], 24)
    share = shared / max(1, total)
    said = f"{share:.0%} of the source's answers come before the first difference"
    if share < least:
        return wrong(f"{said}, but at least {least:.0%} must: the weights differ by more than rounding", share=share)
    return works(f"{said} (at least {least:.0%})", share=share)


def _least_shared(agreement: float, tokens: int) -> float:
    """Return the number of leading tokens that two answers must share.

    Each of `tokens` tokens is equal with the probability `agreement` if all tokens before it are
    equal. The limit is half of the expected number, because the number varies.
    """
    expected = sum(agreement**position for position in range(1, tokens + 1)) / tokens
    return expected / 2
