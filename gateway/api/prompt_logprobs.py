"""The field `prompt_logprobs` of answers, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.choice import Choice, json_logprob
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.routing.served_models import GenerativeModel


async def render_prompt_logprobs(
    choices: Sequence[Choice], count: int, state: AppState, model: GenerativeModel, context: RequestContext
) -> list[dict[str, Any] | None] | None:
    """Return an entry for each prompt token, on a text thread if there are many.

    Args:
        choices: The choices of one prompt. The engine's first tokens brought the entries to one.
        count: The alternatives that the request asks for. A rank beyond them is not known.
        state: The gateway's state.
        model: The model.
        context: The request.
    """
    places = next((choice.prompt_logprobs for choice in choices if choice.prompt_logprobs is not None), None)
    if places is None:
        return None

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        text = model.tokenizer.detokenizers.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": json_logprob(value), "rank": rank if rank <= count else None, "decoded_token": text}

    def render() -> list[dict[str, Any] | None]:
        # nothing precedes the first token
        found: list[dict[str, Any] | None] = [None]
        for place in places:
            found.append({str(token): entry(token, value, rank) for rank, (token, value) in enumerate(place, 1)})
        return found

    return await state.text_threads.run(render, 4 * sum(map(len, places)), context.caller.share)
