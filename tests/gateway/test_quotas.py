"""Tests of the quotas of callers at the gateway.

Every way in which an answer can end leaves exactly what was used.
"""

import asyncio
from contextlib import nullcontext
from datetime import UTC, datetime

import anthropic
import pytest

from llmops.gateway.errors import RateLimitError
from llmops.gateway.http.middleware import Check
from llmops.gateway.interfaces import Budget, Caller, Outcome, Quota, QuotaReservation, Usage
from llmops.gateway.ratelimit.buckets import Limit, LimitRequest
from llmops.gateway.ratelimit.limits import GROWTH_INTERVAL, RateLimits, Reservation
from llmops.gateway.ratelimit.memory import InMemoryLimiter
from llmops.gateway.ratelimit.output_length import MIN_TOKENS
from llmops.gateway.ratelimit.quotas import CallerLimits
from llmops.gateway.ratelimit.rate_limit_check import RateLimitCheck
from llmops.gateway.safety.services import ModerationFilter
from llmops.gateway.settings import Quotas
from tests.support.anthropic_sdk import sdk_of
from tests.support.gateway_stack import BODIES, CHAT, COMPLETIONS, END, MESSAGES, running
from tests.support.scripted_triton import Step
from tests.support.waiting import Clock, eventually

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
PRICE = 7  # micros for a token of the prompt, and twice that for one of the answer


class Ledger:
    """The spending of keys, as a ledger would know it."""

    def __init__(self) -> None:
        self.known = 0
        self.asked: list[tuple[str, datetime]] = []

    def tariff(self, model, at):
        return lambda prompt, cached, answer: PRICE * (prompt + 2 * answer)

    async def spent(self, of, since) -> int:
        self.asked.append((of, since))
        return self.known


class Keys(Check):
    """Everybody has the key `key`, with `quotas`."""

    def __init__(self) -> None:
        self.quotas: tuple[Quota, ...] = ()

    async def before(self, scope, context) -> None:
        context.caller = Caller("acme", "ann", "key-a", "acme/key-a", quotas=self.quotas)


class Bounded:
    """A gateway whose limits stand still in time, so that what is left is what was not used."""

    def __init__(self, stack, keys: Keys, gate: RateLimits, clock: Clock, ledger: Ledger) -> None:
        self.stack, self.keys, self.gate, self.clock, self.ledger = stack, keys, gate, clock, ledger
        self.post = stack.client.post

    def quota(self, **limits) -> None:
        self.keys.quotas = (Quota("key-a", **limits),)

    def left(self, **limit: int) -> float:
        """Return the rest of a limit: `requests`, `tokens` or `places`."""
        ((name, _),) = limit.items()
        left = self.gate.limiter.reserve_now([Limit("key-a::", **limit)], [LimitRequest()]).decision.left[0]
        return left[("requests", "tokens", "places").index(name)]

    async def over(self) -> None:
        """Wait until all requests have ended."""
        await self.stack.idle()
        await eventually(lambda: not self.gate.open)
        # another one hears its end before this one does
        await self.stack.client.get("/health/live")


@pytest.fixture
async def bounded(card, tokenizer):
    clock, ledger, keys = Clock(), Ledger(), Keys()
    gate = RateLimits(InMemoryLimiter(clock), ledger, clock, lambda: NOON)
    async with running(
        {**card, "max_batch_size": 8}, tokenizer, checks=[keys, RateLimitCheck(gate, Quotas())]
    ) as stack:
        yield Bounded(stack, keys, gate, clock, ledger)
    await gate.close()


# -- requests --------------------------------------------------------------------------------------------------------


async def test_requests_per_minute(bounded):
    bounded.quota(rpm=2)
    bounded.stack.say("Hello")
    for left in ("1", "0"):
        answer = await bounded.post(CHAT, json=BODIES[CHAT])
        assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "2")
        assert answer.headers["x-ratelimit-remaining-requests"] == left
    assert answer.headers["x-ratelimit-reset-requests"] == "1m0s"
    refused = await bounded.post(CHAT, json=BODIES[CHAT])
    assert refused.status_code == 429
    told = ("retry-after", "retry-after-ms", "x-should-retry", "x-ratelimit-remaining-requests")
    assert [refused.headers[name] for name in told] == ["30", "30000", "true", "0"]
    assert refused.json()["error"] == {
        "message": "Rate limit of key-a reached on requests per minute: limit 2, left 0, needed 1. Try again in 30s.",
        "type": "requests",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    bounded.clock.now = 30.0
    assert (await bounded.post(CHAT, json=BODIES[CHAT])).status_code == 200


async def test_requests_without_an_answer_count_one_after_another(bounded):
    bounded.quota(rpm=10)
    # reading and cancelling are free
    for _ in range(3):
        assert (await bounded.stack.client.get("/v1/models")).status_code == 200
        assert (await bounded.post("/v1/responses/none/cancel")).status_code == 404
    assert bounded.left(requests=10) == 10
    bodies = [(CHAT, {}), (CHAT, {**BODIES[CHAT], "model": "unknown"}), ("/tokenize", {"model": "m"})]
    statuses = [(await bounded.post(path, json=body)).status_code for path, body in bodies * 10]
    assert (429 in statuses[:10], set(statuses[10:])) == (False, {429})


async def test_open_requests(bounded):
    bounded.quota(concurrent=1)
    bounded.stack.steps(Step((9,)), Step(hang=True))
    async with bounded.stack.client.stream("POST", CHAT, json={**BODIES[CHAT], "stream": True}) as response:
        assert response.status_code == 200
        refused = await bounded.post(CHAT, json=BODIES[CHAT])
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "At most 1 request of key-a may be open at once" in refused.json()["error"]["message"]
    await bounded.over()
    assert bounded.left(places=1) == 1
    bounded.clock.now += 1
    bounded.stack.say("Hello")
    assert (await bounded.post(CHAT, json=BODIES[CHAT])).status_code == 200


async def test_litellm_18730_concurrent_requests_do_not_pass_together(bounded):
    bounded.quota(concurrent=3)
    bounded.stack.steps(Step((9,), wait=0.3), Step((END,)), Step(final=True))
    answers = await asyncio.gather(*(bounded.post(CHAT, json=BODIES[CHAT]) for _ in range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 9


# -- tokens ----------------------------------------------------------------------------------------------------------


async def test_litellm_34223_the_length_that_rules_is_reserved(bounded):
    """738 tokens went through a key of 60 with `max_tokens: 1` beside `max_completion_tokens`."""
    bounded.quota(tpm=60)
    bounded.stack.say("Hello world! How are you?")
    refused = await bounded.post(CHAT, json={**BODIES[CHAT], "max_tokens": 1, "max_completion_tokens": 200})
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in refused.headers
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    assert error["message"].startswith("The request has more tokens than key-a may use in a minute (60): ")
    assert error["message"].endswith("and up to 200 in the answer; ask for a shorter answer.")
    assert (bounded.left(tokens=60), bounded.stack.triton.requests) == (60, [])


async def test_litellm_29193_a_first_request_without_max_tokens_passes_a_small_limit(bounded):
    bounded.quota(tpm=40)
    bounded.stack.say("Hello")
    answer = await bounded.post(CHAT, json=BODIES[CHAT])
    assert (answer.status_code, bounded.left(tokens=40)) == (200, 40 - answer.json()["usage"]["total_tokens"])


async def test_without_a_length_short_answers_reserve_as_much_as_unknown_ones(bounded):
    bounded.quota(tpm=5000)
    go = asyncio.Event()

    async def script(tensors):
        await go.wait()
        for step in (*[Step((9,))] * 11, Step((END,)), Step(final=True)):
            yield step

    bounded.stack.triton.script = script
    reserved = []
    for _ in range(2):
        before = bounded.left(tokens=5000)
        asking = asyncio.create_task(bounded.post(CHAT, json=BODIES[CHAT]))
        await eventually(lambda: bounded.stack.triton.active)
        reserved.append(before - bounded.left(tokens=5000))
        go.set()
        answer = (await asking).json()
        await bounded.over()
        go.clear()
    prompt = answer["usage"]["prompt_tokens"]
    assert reserved == [prompt + min(MIN_TOKENS, 256 - prompt)] * 2


async def test_long_answers_of_one_caller_leave_others_their_quotas(bounded):
    """Before the fix, four of five small requests waited 30 s once another tenant had long answers."""

    async def ask(owner: str, length: int) -> QuotaReservation:
        one = bounded.gate.new_reservation(CallerLimits((Quota(owner, tpm=8000),), owner))
        await one.enter()
        await one.tokens("tiny", 20, 30_000, bounded=False)
        return one

    for owner, length in [("b", 10)] * 20 + [("a", 6000)] * 200:
        bounded.clock.now += 60
        (await ask(owner, length)).close(Outcome(200, "stop", Usage(20, length)))
    for one in [await ask("b", 10) for _ in range(5)]:
        one.close(Outcome(200, "stop", Usage(20, 10)))


@pytest.mark.parametrize("gateways", [1, 4])
async def test_the_debt_of_one_caller_leaves_others_the_limit_of_all(bounded, monkeypatch, gateways):
    """Before the fix, 50 unbounded answers after short ones closed it for all callers for minutes."""
    gate, clock = bounded.gate, bounded.clock
    # a client that stays with one of several gateways pays there at the whole rate
    monkeypatch.setattr(gate.limiter, "gateways", gateways)
    all_callers = Quota("all callers", tpm=6000)
    plans = {name: CallerLimits((Quota(name, tpm=2000), all_callers), name) for name in ("a", "b")}

    async def ask(name: str) -> QuotaReservation:
        one = gate.new_reservation(plans[name])
        await one.enter()
        await one.tokens("tiny", 12, 30_000, bounded=False)
        return one

    def left() -> float:
        limit = [Limit("all callers::", tokens=6000)]
        return gate.limiter.reserve_now(limit, [LimitRequest()]).decision.left[0][1]

    for _ in range(44):
        clock.now += 60
        (await ask("a")).close(Outcome(200, "stop", Usage(12, 2)))
    clock.now += 60
    running = [await ask("a") for _ in range(7)]
    with pytest.raises(RateLimitError):
        await ask("a")
    for one in running:
        one.follow(lambda: Usage(12, 4000))
        one.extend()
        one.close(Outcome(499, "cancelled", Usage(12, 5000)))
    gate.charge_postponed(1)
    assert 6000 - 2000 - 2000 / 60 <= left() <= 6000 - 7 * 268
    (await ask("b")).close(Outcome(200, "stop", Usage(12, 2)))
    # in the end all of it is charged, at the caller's own rate
    charged = 7 * 268 + 2000 / 60 + 14
    for seconds in (60, 600, 600):
        gate.charge_postponed(seconds)
        charged = min(charged + 2000 / 60 * seconds, 7 * 5012 + 14)
        assert left() == pytest.approx(6000 - charged)


async def test_a_longer_answer_is_owed_while_it_grows(bounded, monkeypatch):
    """Other requests see the usage beyond a reservation before the answer ends."""
    monkeypatch.setattr("llmops.gateway.ratelimit.output_length.MIN_TOKENS", 1)
    bounded.quota(tpm=5000)
    bounded.gate.expected.note("tiny", 1, "key-a")
    bounded.stack.steps(*[Step((9,))] * 50, Step(hang=True))
    async with bounded.stack.client.stream("POST", CHAT, json={**BODIES[CHAT], "stream": True}) as response:
        assert response.status_code == 200
        await eventually(lambda: bounded.left(tokens=5000) <= 5000 - 50, seconds=20 * GROWTH_INTERVAL)
    await bounded.over()


async def test_tokens_are_refilled_and_smaller_requests_need_not_wait_for_larger(bounded):
    bounded.quota(tpm=120)
    bounded.stack.say("Hello")
    await bounded.post(CHAT, json={**BODIES[CHAT], "max_tokens": 80})
    left = bounded.left(tokens=120)
    refused = await bounded.post(CHAT, json={**BODIES[CHAT], "max_tokens": 100})
    assert refused.status_code == 429
    needed = int(refused.json()["error"]["message"].partition("needed ")[2].partition(".")[0])
    assert float(refused.headers["retry-after-ms"]) == pytest.approx((needed - left) / 2 * 1000, abs=1)
    small = {"model": "tiny", "prompt": "a", "max_tokens": 1, "user": "bob"}
    assert (await bounded.post(COMPLETIONS, json=small)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": BODIES[CHAT]["messages"]}),
        ("/v1/responses/input_tokens", {"input": "a"}),
    ],
)
async def test_a_quota_of_one_model_counts_requests_that_generate_nothing(bounded, path, body):
    """Before the fix, these routes named a model and were not counted by its quota."""
    body["model"] = "tiny"
    bounded.keys.quotas = (Quota("key-a", rpm=3, tpm=1), Quota("key-a", rpm=1, model="tiny"))
    statuses = [(await bounded.post(path, json=body)).status_code for _ in range(2)]
    assert statuses == [200, 429]


async def test_a_quota_of_one_model(bounded):
    bounded.keys.quotas = (Quota("key-a", rpm=1, model="tiny"), Quota("key-a", rpm=1, model="other"))
    bounded.stack.say("Hello")
    assert (await bounded.post(CHAT, json=BODIES[CHAT])).status_code == 200
    refused = await bounded.post(CHAT, json=BODIES[CHAT])
    assert refused.status_code == 429
    assert refused.json()["error"]["message"].startswith("Rate limit of key-a for the model 'tiny' reached on requests")
    # before the fix, requests for other models of a caller without any other quota were a 500
    bounded.keys.quotas = (Quota("key-a", rpm=1, model="other"),)
    assert [(await bounded.post(CHAT, json=BODIES[CHAT])).status_code for _ in range(2)] == [200, 200]


async def test_a_key_and_its_tenant_bound_both_or_nothing_is_taken(bounded):
    bounded.keys.quotas = (Quota("key-a", rpm=10), Quota("tenant acme", rpm=1))
    bounded.stack.say("Hello")
    answers = [await bounded.post(CHAT, json=BODIES[CHAT]) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert "of tenant acme" in answers[1].json()["error"]["message"]
    assert (answers[0].headers["x-ratelimit-limit-requests"], bounded.left(requests=10)) == ("1", 9)


# -- money -----------------------------------------------------------------------------------------------------------


async def test_litellm_25374_budgets_come_from_the_ledger(bounded):
    """A restart is no free refill; nor is a ledger that is away."""
    bounded.ledger.known = 990
    bounded.quota(budget=Budget(1000, "day"))
    bounded.stack.say("Hello")
    assert (await bounded.post(CHAT, json=BODIES[CHAT])).json()["error"]["code"] == "insufficient_quota"
    assert bounded.ledger.asked == [("key-a", datetime(2026, 11, 22, tzinfo=UTC))]


async def test_no_filter_judges_texts_over_a_quota_or_budget(card, tokenizer, monkeypatch):
    """Before the fix, each text for `/v1/moderations` was a free generation of a guard model."""
    judged = []

    async def judge(self, text: str) -> None:
        judged.append(text)

    monkeypatch.setattr(ModerationFilter, "judge", judge)
    clock, ledger, keys = Clock(), Ledger(), Keys()
    gate = RateLimits(InMemoryLimiter(clock), ledger, clock, lambda: NOON)
    filters = {"filters": {"http": {"kind": "http", "url": "http://127.0.0.1:9/v1/moderations"}}}
    async with running(card, tokenizer, checks=[keys, RateLimitCheck(gate, Quotas())], safety=filters) as stack:

        async def moderated(**quota) -> list[int]:
            keys.quotas, clock.now = (Quota("key-a", **quota),), clock.now + 60
            texts = [{"input": text} for text in ("a knife", "a spoon", ["a fork", "a plate"], "a pot")]
            return [(await stack.client.post("/v1/moderations", json=one)).status_code for one in texts]

        ledger.known = 100
        assert await moderated(budget=Budget(100, "day")) == [429] * 4
        assert await moderated(rpm=100, tpm=2) == [200, 200, 429, 429]  # a token for 4 bytes
        assert judged == ["a knife", "a spoon"]
        assert await moderated(budget=Budget(101, "month")) == [200] * 4  # they cost nothing
    await gate.close()


def test_periods():
    month, week, day = (Budget(1, period) for period in ("month", "week", "day"))
    at = datetime(2026, 12, 31, 23, 59, tzinfo=UTC)  # a Thursday
    assert (month.begins(at).day, month.ends(at)) == (1, datetime(2027, 1, 1, tzinfo=UTC))
    assert (week.begins(at).day, week.ends(at)) == (28, datetime(2027, 1, 4, tzinfo=UTC))
    assert (day.begins(at).day, day.ends(at)) == (31, datetime(2027, 1, 1, tzinfo=UTC))


# -- who, and in whose terms -----------------------------------------------------------------------------------------


@pytest.fixture
async def open_gateway(card, tokenizer):
    """Without keys; limits by the settings alone."""
    async with running(card, tokenizer, port=0, quotas=Quotas(each={"rpm": 1}, all={"rpm": 1000})) as stack:
        stack.say("Hello")
        yield stack


async def test_a_client_cannot_choose_who_it_is(open_gateway):
    """AIBrix bounds by a header that clients write, and without it nobody."""
    first = await open_gateway.chat()
    assert (first.status_code, first.headers["x-ratelimit-limit-requests"]) == (200, "1")
    for name in ("authorization", "x-api-key", "user"):
        answer = await open_gateway.client.post(CHAT, json=open_gateway.chat_body, headers={name: "Bearer another"})
        assert answer.status_code == 429
        assert answer.json()["error"]["message"].startswith("Rate limit of client 127.0.0.1 reached")


async def test_anthropics_client_raises_what_it_knows(open_gateway):
    async with sdk_of(open_gateway) as client:
        await client.messages.create(**BODIES[MESSAGES])
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**BODIES[MESSAGES])
    assert caught.value.body["error"]["type"] == "rate_limit_error"
    assert "retry-after" in caught.value.response.headers


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True])
async def test_an_answer_that_another_gateway_takes_over_is_counted_once(ended):
    """The gateway that began it was killed, or has ended and left it to the other one."""
    gate = RateLimits(InMemoryLimiter(Clock()), None, Clock())
    limits = CallerLimits((Quota("key-a", tpm=1000),))
    first, second = gate.new_reservation(limits), gate.new_reservation(limits)
    await first.tokens("tiny", 10, 90)
    if ended:
        first.hand_over()
        first.close(Outcome(200, "cancelled"))
    await second.tokens("tiny", 10, 90, known=first.reserved_tokens)
    second.close(Outcome(200, "stop", Usage(10, 40)))
    key = [Limit("key-a::", tokens=1000)]
    assert gate.limiter.reserve_now(key, [LimitRequest()]).decision.left[0][1] == 1000 - 50
    await gate.close()


@pytest.mark.parametrize("is_taken", [True, False])
async def test_the_money_of_an_answer_that_is_offered_stays_held_until_it_is_taken(is_taken):
    """Before the fix, a key spent it again in the second before another gateway took the answer over."""
    limits = RateLimits(InMemoryLimiter(Clock()), Ledger(), now=lambda: NOON)
    plan = CallerLimits((Quota("key", budget=Budget(PRICE * 1_000, "month")),))
    first, second = limits.new_reservation(plan), limits.new_reservation(plan)
    await first.tokens("m", 400, 300)
    first.hand_over(is_taken)
    first.close(Outcome(0))
    with nullcontext() if is_taken else pytest.raises(RateLimitError):
        await second.tokens("m", 400, 300)
    await limits.close()


async def test_an_answer_that_is_taken_over_holds_its_money_and_slot_although_its_gateways_hold_still_counts():
    """Before the fix, the lost gateway's hold left nothing, so the answer held and cost nothing here."""
    limits = RateLimits(InMemoryLimiter(Clock()), Ledger(), now=lambda: NOON)
    plan = CallerLimits((Quota("key", concurrent=2, budget=Budget(PRICE * 1_000, "month")),))

    async def asked() -> Reservation:
        one = limits.new_reservation(plan)
        try:
            await one.enter()
            assert await one.tokens("m", 400, 300) == 300
        except RateLimitError:
            one.close(Outcome(429))
            raise
        return one

    lost = await asked()
    taken = limits.new_reservation(plan)
    assert await taken.tokens("m", 400, 300, known=400) == 300
    lost.hand_over()
    lost.close(Outcome(0))
    with pytest.raises(RateLimitError):
        await asked()
    taken.close(Outcome(200, "stop", Usage(400, 300)))
    with pytest.raises(RateLimitError):
        await asked()
    assert limits.limiter.reserve_now(plan.before.all, [LimitRequest()]).decision.left[0][2:] == (2, 0)
    await limits.close()
