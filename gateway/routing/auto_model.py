"""Routed aliases, which choose between a small and a large model for each request.

Rules come first: the client's header, the caller's tier, tools, schemas, long prompts, code. If no
rule decides, an optional trained head scores the user's texts. A conversation that has used the
large model keeps it. The rules read only properties that stay the same during a conversation, so
that another worker, which does not know the conversation, makes the same choice.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmops.background import LogOnce
from llmops.gateway.errors import ApiError, InvalidRequestError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.routing.admission.degradation import Degradation, DegradedLevel
from llmops.gateway.routing.versions.version_table import conversation_key
from llmops.gateway.safety.filters import JUDGED_TENANT
from llmops.gateway.safety.services import ClassifierHead, Embed, head_scores, read_head
from llmops.gateway.settings import RoutedAlias

log = logging.getLogger(__name__)

#: Header in which a client requests a quality: `high` or `low`.
QUALITY_HEADER = "x-llmops-quality"
#: Name of the category in a router's head that selects the large model.
LARGE = "large"
#: Maximum number of remembered conversations with the large model, which bounds the memory: 8 bytes
#: each plus the overhead of a dict.
MAX_CONVERSATIONS = 100_000
#: Maximum number of texts whose scores are remembered, which bounds the memory.
MAX_SCORES = 10_000
#: Maximum number of a user's latest texts that are scored, which bounds the time for a long
#: conversation.
MAX_SCORED_TEXTS = 8
#: Maximum seconds for the embedding model, because the client waits. The request then continues
#: without a score.
SCORE_TIMEOUT = 0.25
_CODE = re.compile(
    r"```|^[^\S\n]*+(def|class|import|from|function|const|public|#include|SELECT|CREATE TABLE)\b.*[({;:]", re.M
)
_SCHEMA_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")

Reason = Literal[
    "conversation", "quality", "tier", "tools", "schema", "length", "code", "head", "default", "degraded", "fallback"
]


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The models to try for a request, in order, and the reason for the choice."""

    models: tuple[str, ...]
    reason: Reason


class AutoModel:
    """The aliases of a gateway that choose a model for each request."""

    def __init__(
        self, aliases: Mapping[str, RoutedAlias], embed: Embed, degradation: Degradation | None = None
    ) -> None:
        """Create the aliases, and read the router head of each alias that has one.

        Args:
            aliases: The aliases by name.
            embed: Returns the vectors of texts from an embedding model.
            degradation: The degraded mode of the models.

        Raises:
            InputError: A router head cannot be read.
        """
        self.aliases = aliases
        self._heads = {
            name: read_head(alias.head, "router head", "llmops router train")
            for name, alias in aliases.items()
            if alias.head
        }
        self._embed, self._degradation = embed, degradation
        # By tenant; all anonymous callers are one tenant.
        self._large_conversations: dict[str, OrderedDict[int, None]] = {}
        self._scores: OrderedDict[int, float] = OrderedDict()
        self._problems = LogOnce()

    async def choose(self, name: str, body: object, context: RequestContext) -> RouteDecision:
        """Return the decision for a request to the alias `name`.

        Raises:
            InvalidRequestError: The value of the quality header is unknown.
        """
        alias = self.aliases[name]
        is_ongoing = _is_ongoing(body)
        known = self._large_conversations.get(context.caller.tenant_id, ())
        if is_ongoing and hash((name, conversation_key(body, context.caller))) in known:
            return RouteDecision((alias.large,), "conversation")
        is_large, reason = _by_rules(alias, body, context)
        head = self._heads.get(name)
        if reason == "default" and head is not None:
            JUDGED_TENANT.set(context.caller.group)
            score = await self._score(head, _user_texts(body), context.caller.tenant_id or context.caller.owner)
            is_large = score is not None and score >= head.thresholds[LARGE]
            reason = "head" if is_large else "default"
        if not is_large:
            return RouteDecision((alias.small, alias.large), reason)
        if is_ongoing:
            return RouteDecision((alias.large,), reason)
        level = self._degradation.level(alias.large) if self._degradation is not None else 0
        if level >= DegradedLevel.SMALL_MODEL:
            return RouteDecision((alias.small, alias.large), "degraded")
        return RouteDecision((alias.large, alias.small), reason)

    def record(self, name: str, model: str, body: object, context: RequestContext) -> None:
        """Record the chosen model, so that a conversation keeps the large model.

        Beyond `MAX_CONVERSATIONS`, the oldest conversation of the tenant with the most is dropped.
        """
        if model == self.aliases[name].large:
            known = self._large_conversations.setdefault(context.caller.tenant_id, OrderedDict())
            key = hash((name, conversation_key(body, context.caller)))
            known[key] = None
            known.move_to_end(key)
            tenants = self._large_conversations.values()
            if sum(map(len, tenants)) > MAX_CONVERSATIONS:
                max(tenants, key=len).popitem(last=False)

    async def _score(self, head: ClassifierHead, texts: Sequence[str], tenant: str) -> float | None:
        """Return the highest score that a router head gives to `texts`.

        The result is None without texts, or if the embedding model does not answer. A score is
        reused for one tenant only, because the response time would reveal the texts to other
        tenants.
        """
        keys = {hash((tenant, head.model, text)): text for text in texts}
        scores = {key: self._scores[key] for key in keys if key in self._scores}
        missing = [key for key in keys if key not in scores]
        if missing:
            try:
                async with asyncio.timeout(SCORE_TIMEOUT):
                    vectors = await self._embed(head.model, [keys[key] for key in missing])
                found = dict(zip(missing, head_scores(head.matrix, vectors), strict=True))
            except (ApiError, TimeoutError, ValueError) as error:
                if self._problems.is_new(head.model, type(error).__name__):
                    reason = str(error) or f"it took more than {1000 * SCORE_TIMEOUT:g} ms"
                    log.warning(
                        "The embedding model %s of the router does not answer (%s); requests get no score",
                        head.model,
                        reason,
                    )
                return None
            self._problems.is_new(head.model, None)
            large = list(head.weights).index(LARGE)
            for key, score in found.items():
                scores[key] = self._scores[key] = float(score[large])
            while len(self._scores) > MAX_SCORES:
                self._scores.popitem(last=False)
        return max(scores.values(), default=None)


def _by_rules(alias: RoutedAlias, body: object, context: RequestContext) -> tuple[bool, Reason]:
    quality = context.headers.get(QUALITY_HEADER.encode(), b"").decode("latin-1")
    if quality:
        if quality not in ("high", "low"):
            raise InvalidRequestError(f"The header {QUALITY_HEADER} must be high or low.", param=QUALITY_HEADER)
        return quality == "high", "quality"
    if context.caller.tier in alias.tiers:
        return alias.tiers[context.caller.tier] == LARGE, "tier"
    if getattr(body, "tools", None):
        return True, "tools"
    if _has_schema(body):
        return True, "schema"
    # check the length first: it bounds the text in which code is searched
    if sum(map(len, _all_texts(body))) > alias.prompt_characters:
        return True, "length"
    if any(_CODE.search(text) for text in _user_texts(body)):
        return True, "code"
    return False, "default"


def _has_schema(body: object) -> bool:
    if any(getattr(body, field, None) for field in _SCHEMA_FIELDS):
        return True
    asked = getattr(body, "response_format", None) or getattr(getattr(body, "text", None), "format", None)
    kind = asked.get("type") if isinstance(asked, dict) else getattr(asked, "type", None)
    return kind in ("json_schema", "json_object")


def _is_ongoing(body: object) -> bool:
    """Return True if the request continues a conversation."""
    if getattr(body, "conversation_id", None) or getattr(body, "previous_response_id", None):
        return True
    return any(_field(message, "role") == "assistant" for message in _messages(body))


def _messages(body: object) -> Sequence[Any]:
    found = getattr(body, "messages", None) or getattr(body, "input", None) or ()
    return found if isinstance(found, list) else ()


def _user_texts(body: object) -> list[str]:
    """Return the user's latest texts in the request."""
    messages = _messages(body)
    if not messages:
        return list(_texts(getattr(body, "input", None) or getattr(body, "prompt", None)))[-MAX_SCORED_TEXTS:]
    own = (message for message in messages if _field(message, "role") == "user")
    return [text for message in own for text in _texts(_field(message, "content"))][-MAX_SCORED_TEXTS:]


def _all_texts(body: object) -> Iterator[str]:
    for name in ("system", "instructions", "prompt", "input"):
        yield from _texts(getattr(body, name, None))
    for message in _messages(body):
        yield from _texts(_field(message, "content"))


def _texts(content: object) -> Iterator[str]:
    """Yield the texts in a message's content, in the format of any API."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part if isinstance(part, str) else _field(part, "text")
            if isinstance(text, str):
                yield text


def _field(part: object, name: str) -> Any:
    return part.get(name) if isinstance(part, dict) else getattr(part, name, None)
