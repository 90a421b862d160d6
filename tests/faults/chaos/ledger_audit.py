"""The books against what the clients know: yields what is wrong, in words; nothing if all is right."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.faults.chaos.clients import Asked
from tests.faults.chaos.stage import CACHED, INPUT, OUTPUT

Row = Mapping[str, Any]


def errors(
    asked: Sequence[Asked], rows: Sequence[Row], totals: Mapping[str, int], gaps: int, made: int | None = None
) -> list[str]:
    """`gaps` in the gateways' numbers; `made`: tokens by the engine's own count."""
    found = [*_requests(asked, rows), *(line for row in rows for line in _row(row)), *_sums(rows, totals, gaps)]
    if made is not None and made < totals["output_tokens"]:
        found.append(f"{totals['output_tokens']} tokens are billed, and the engine made {made}")
    return found


def _requests(asked: Sequence[Asked], rows: Sequence[Row]) -> Iterator[str]:
    by_id = {row["request_id"]: row for row in rows}
    for name, count in Counter(row["request_id"] for row in rows).items():
        if count > 1:
            yield f"{name} has {count} rows"
    known = {one.answer_id for one in asked if one.answer_id}
    for one in asked:
        if one.answer_id and (one.got or one.done):
            row = by_id.get(one.answer_id)
            if row is None:
                yield f"{one.answer_id} had {one.got} events and has no row"
            else:
                yield from _billed(one, row)
    # whose client got nothing of it: no more of them than there are such clients
    unseen = [row for row in rows if row["request_id"] not in known]
    lost = sum(one.lost for one in asked)
    if len(unseen) > lost:
        yield f"{len(unseen)} rows of requests that no client knows; only {lost} were lost before anything came"
    for row in unseen:
        if row["finish_reason"] not in ("gateway_lost", "cancelled", "engine_lost", "length"):
            yield f"{row['request_id']} ended with {row['finish_reason']}, but no client got that answer"


def _billed(one: Asked, row: Row) -> Iterator[str]:
    if one.done:
        told = one.prompt, one.completion, one.tokens
        if told != (row["input_tokens"], row["output_tokens"], row["output_tokens"]):
            yield f"{one.answer_id}: (prompt, answer, asked for) {told}, and {row['output_tokens']} are billed"
    elif not one.got <= row["output_tokens"] <= one.tokens:
        # an event has at least one token
        yield f"{one.answer_id}: {one.got} events came of {one.tokens} tokens, and {row['output_tokens']} are billed"


def _row(row: Row) -> Iterator[str]:
    fresh = row["input_tokens"] - row["cached_tokens"]
    cost = (fresh * INPUT + row["cached_tokens"] * CACHED + row["output_tokens"] * OUTPUT + 500_000) // 1_000_000
    if row["cost_micros"] != cost:
        yield f"{row['request_id']} costs {row['cost_micros']} and not {cost} micro-dollars"


def _sums(rows: Sequence[Row], totals: Mapping[str, int], gaps: int) -> Iterator[str]:
    if gaps:
        yield f"{gaps} gaps in the gateways' numbers"
    summed = {"requests": len(rows)}
    summed |= {name: sum(row[name] for row in rows) for name in totals if name != "requests"}
    for name, total in totals.items():
        if summed[name] != total:
            yield f"the totals have {total} {name}, the rows {summed[name]}"
