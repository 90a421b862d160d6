"""Every request passes the same checks, whichever way it takes, and every check hears once how it ended."""

import contextlib
import hashlib
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from llmops.errors import InputError
from llmops.gateway.api import chat_completions
from llmops.gateway.app import create_app
from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import Check, RequestMiddleware
from llmops.gateway.interfaces import Caller, Outcome, Usage
from llmops.gateway.settings import GatewaySettings, load_settings
from tests.support.gateway_stack import BODIES, CHAT, running
from tests.support.waiting import eventually


class Watch(Check):
    """Notes what it sees, and refuses while `refuses` is set."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.heard: list[tuple[str, Outcome]] = []
        self.refuses: Exception | None = None

    async def before(self, scope, context) -> None:
        self.asked.append((scope["method"], context.route))
        if self.refuses is not None:
            raise self.refuses

    def after(self, context, outcome) -> None:
        self.heard.append((context.request_id, outcome))

    async def outcome(self, request_id: str) -> Outcome:
        """Return the outcome of a request, which was notified exactly once.

        A second notification would be in the list by the time that another request is answered.
        """
        await eventually(lambda: any(name == request_id for name, _ in self.heard))
        (found,) = (outcome for name, outcome in self.heard if name == request_id)
        return found


def client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def app(watch):
    return create_app(GatewaySettings(triton="127.0.0.1:1"), checks=[watch])


async def text(request):
    return PlainTextResponse("text")


# -- before ----------------------------------------------------------------------------------------------------------


async def test_a_check_may_be_a_setting(tmp_path, monkeypatch):
    """One file and a line of the configuration."""
    (tmp_path / "house_rules.py").write_text(
        "from llmops.gateway.errors import UnavailableError\n"
        "from llmops.gateway.http.middleware import Check\n"
        "class Closed(Check):\n"
        "    def __init__(self, settings): self.port = settings.port\n"
        "    async def before(self, scope, context): raise UnavailableError(f'Closed on {self.port}.')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "gateway.yaml"
    config.write_text("triton: 127.0.0.1:1\nport: 7\nrequest_checks: ['house_rules:Closed']\n")
    async with client(create_app(load_settings(config))) as http:
        assert (await http.post(CHAT, json={})).json()["error"]["message"] == "Closed on 7."
    config.write_text("request_checks: ['house_rules:Open']\n")
    said = r"The setting `request_checks\.0`.*module:name of something that can be imported"
    with pytest.raises(InputError, match=said):
        load_settings(config)


async def test_the_first_that_refuses_is_the_last_that_is_asked_and_all_hear(watch):
    first, last = Watch(), Watch()
    watch.refuses = UnavailableError("Closed.")
    async with client(create_app(GatewaySettings(triton="127.0.0.1:1"), checks=[first, watch, last])) as http:
        assert (await http.post(CHAT, json={})).status_code == 503
        assert [(len(check.asked), len(check.heard)) for check in (first, watch, last)] == [(1, 1), (1, 1), (0, 1)]
        # what no route has is not asked for, and heard of
        assert (await http.post("/v1/nothing")).status_code == 404
    assert (len(watch.asked), [outcome for _, outcome in watch.heard[1:]]) == (1, [Outcome(404, "error")])


async def test_a_check_that_breaks_lets_nobody_through_and_one_that_breaks_at_the_end_harms_nobody(watch, caplog):
    class Broken(Check):
        def after(self, context, outcome):
            raise ValueError("after")

    async with client(create_app(GatewaySettings(triton="127.0.0.1:1"), checks=[Broken(), watch])) as http:
        assert (await http.get("/health/live")).status_code == 200
        watch.refuses = ValueError("before")
        refused = await http.get("/health/live")
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")
    assert [outcome for _, outcome in watch.heard] == [Outcome(200), Outcome(500, "error")]
    assert "a check failed after the request had ended" in caplog.text


async def test_middlewares_and_handlers_hold_for_both_ways(app, watch):
    class Marked:
        def __init__(self, app) -> None:
            self.app = app

        async def __call__(self, scope, receive, send) -> None:
            async def marked(message):
                if message["type"] == "http.response.start":
                    message["headers"].append((b"x-marked", b"yes"))
                await send(message)

            await self.app(scope, receive, marked if scope["type"] == "http" else send)

    async def broken(request: Request):
        raise LookupError

    async def tea(request, error):
        return PlainTextResponse("tea", 418)

    app.add_middleware(Marked)
    app.add_exception_handler(LookupError, tea)
    app.add_api_route("/broken", broken)
    async with client(app) as http:
        answers = [await http.post(CHAT, json={}), await http.get("/health/live"), await http.get("/broken")]
    assert [(one.status_code, one.headers["x-marked"]) for one in answers] == [(400, "yes"), (200, "yes"), (418, "yes")]
    assert app.fast_routes


# -- after -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def stack(card, tokenizer, watch):
    async with running({**card, "max_batch_size": 4}, tokenizer, checks=[watch]) as one:
        yield one


async def test_requests_without_an_answer(stack, watch, monkeypatch):
    async def outcome(method: str, path: str, **asked) -> Outcome:
        await stack.client.request(method, path, headers={"x-request-id": path}, **asked)
        return await watch.outcome(path)

    assert await outcome("GET", "/v1/models") == Outcome(200)
    for path in ("/v1/responses/none?stream=true&starting_after=x", "/v1/models/none"):
        assert await outcome("GET", path) == Outcome(404, "error")
    assert await outcome("POST", "/v1/completions", content=b"{") == Outcome(400, "error")
    monkeypatch.setattr("llmops.gateway.api.chat_completions.validate_chat", None)
    assert await outcome("POST", CHAT, json=BODIES[CHAT]) == Outcome(500, "error")
    monkeypatch.setattr("llmops.gateway.api.models.describe_model", None)
    assert await outcome("GET", "/v1/models/tiny") == Outcome(500, "error")


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_bug_in_the_middle_of_an_answer(stack, watch, monkeypatch, streaming):
    monkeypatch.setattr(chat_completions.ChatChunks, "finish", None)
    monkeypatch.setattr(chat_completions, "message_of", None)
    stack.say("Hello")
    await stack.client.post(CHAT, json={**BODIES[CHAT], "stream": streaming}, headers={"x-request-id": "bug"})
    status, finish, usage = await watch.outcome("bug")
    assert (status, finish) == (200 if streaming else 500, "error")
    assert usage == Usage(len(stack.triton.requests[-1]["input_ids"]), len(stack.tokenizer.encode("Hello")))


# -- who asks --------------------------------------------------------------------------------------------------------


async def test_callers_without_keys_are_told_apart_by_address_and_credential():
    seen: list[Caller] = []

    class Seen(Check):
        async def before(self, scope, context) -> None:
            seen.append(context.caller)

    app = create_app(GatewaySettings(triton="127.0.0.1:1"), checks=[Seen()])

    async def asked(host: str, **headers: str) -> Caller:
        transport = httpx.ASGITransport(app, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
            await http.get("/health/live")
        return seen[-1]

    plain, keyed = await asked("10.0.0.1"), await asked("10.0.0.1", authorization="Bearer secret")
    digest = hashlib.sha256(b"Bearer secret").hexdigest()
    assert (plain.share, plain.user_id) == ("10.0.0.1", "")
    assert (keyed.share, keyed.user_id) == (f"10.0.0.1/{digest[:16]}", digest)
    assert (await asked("10.0.0.2", authorization="Bearer secret")).user_id == digest
    assert await asked("2001:db8:1:2::7") == await asked("2001:db8:1:2:3:4:5:6")


@pytest.mark.parametrize("closed", [True, False])
async def test_a_connection_that_closes_under_an_answer_is_a_client_that_left(closed) -> None:
    class Connection:
        transport = SimpleNamespace(is_closing=lambda: closed)

        async def send(self, message) -> None:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    watch = Watch()
    door = RequestMiddleware(PlainTextResponse("hello"), lambda scope: "/", [watch])
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", b"one")]}
    with contextlib.nullcontext() if closed else pytest.raises(RuntimeError, match="closed"):
        await door(scope, None, Connection().send)
    assert watch.heard == [("one", Outcome(200, "cancelled" if closed else "error", None))]


async def test_the_long_way_answers_the_same(app):
    """The long way answers the same, except for values that change with each request."""
    for path in ["chat/completions", "completions", "embeddings", "responses", "nothing"]:
        body = {"model": "none", "input": "x", "prompt": "x", "messages": []}
        asked = {"json": body, "headers": {"x-request-id": "same"}}
        short = await client(app).post(f"/v1/{path}", **asked)
        assert (f"/v1/{path}" in app.fast_routes) is (path != "nothing")
        fast_routes, app.fast_routes = app.fast_routes, {}
        long = await client(app).post(f"/v1/{path}", **asked)
        app.fast_routes = fast_routes
        assert (short.status_code, short.json()) == (long.status_code, long.json())
        assert (set(short.headers), short.headers["x-request-id"]) == (set(long.headers), "same")
