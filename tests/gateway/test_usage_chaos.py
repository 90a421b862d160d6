"""Usage under fire, a short run: gateways, ledger, broker, PostgreSQL and Valkey are killed, and the books are right.

`python -m tests.faults.chaos ENGINE` is the long one, on the mock engine.
"""

import asyncio

from tests.faults.chaos.clients import Asked
from tests.faults.chaos.ledger_audit import errors
from tests.faults.chaos.run import chaos
from tests.support.scripted_triton import ScriptedTriton, Step


async def test_the_books_are_right(card, tokenizer):
    (token,) = tokenizer.encode("a")

    async def answer(tensors):
        for _ in range(int(tensors["request_output_len"][0])):
            yield Step((token,), wait=0.02)
        yield Step(final=True)

    triton = ScriptedTriton({**card, "max_batch_size": 64}, answer)
    async with triton:
        result = await asyncio.to_thread(chaos, f"127.0.0.1:{triton.port}", "tiny", 60, 16, (0.3, 1.0))
    print("\n".join(result.lines()))
    assert (result.wrong, set(result.deaths)) == ([], {"gateway", "ledger", "broker", "PostgreSQL", "Valkey"})
    # a machine that is slow has more deaths in one run
    assert result.finishes["length"] > 12


def row(name, **changes):
    counts = {"input_tokens": 10, "cached_tokens": 0, "output_tokens": 5, "cost_micros": 11}
    return {"request_id": name, **counts, "finish_reason": "length", **changes}


def test_wrong_books_are_noticed():
    def found(asked, rows, gaps=0, made=None, **totals):
        names = ("input_tokens", "output_tokens", "cached_tokens", "cost_micros")
        right = {"requests": len(rows)} | {name: sum(one[name] for one in rows) for name in names}
        return errors(asked, rows, right | totals, gaps, made)

    done = Asked(5, None, "a", 5, 10, 5)
    left = Asked(9, 3, "b", 3)
    assert found([done, left], [row("a"), row("b", finish_reason="cancelled")]) == []
    assert found([done], []) == ["a had 5 events and has no row"]
    assert found([done], [row("a"), row("a")]) == ["a has 2 rows"]
    few = [row("b", output_tokens=2, cost_micros=8)]
    assert found([left], few) == ["b: 3 events came of 9 tokens, and 2 are billed"]
    assert "and 6 are billed" in found([done], [row("a", output_tokens=6, cost_micros=11)])[0]
    assert found([done], [row("a", cost_micros=10)]) == ["a costs 10 and not 11 micro-dollars"]
    (told,) = found([done], [row("a"), row("x")])
    assert told.startswith("1 rows of requests that no client knows; only 0 were lost")
    assert found([done], [row("a")], gaps=1) == ["1 gaps in the gateways' numbers"]
    assert found([done], [row("a")], made=5) == []
    assert found([done], [row("a")], made=4) == ["5 tokens are billed, and the engine made 4"]
    assert found([done], [row("a")], requests=2) == ["the totals have 2 requests, the rows 1"]
