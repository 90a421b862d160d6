"""Filters that ask a model or another server.

One filter asks an embedding model and applies a trained head, one asks a guard model for its
verdict, and one asks a server for `/v1/moderations`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import FiniteFloat, TypeAdapter, ValidationError

from llmops.errors import InputError, first_validation_error
from llmops.fair_client import fair_client
from llmops.gateway.errors import ApiError
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.safety.filters import JUDGED_TENANT, FilterUnavailableError, Finding, TextFilter
from llmops.gateway.settings import GuardSettings
from llmops.input_files import MALFORMED, parse_json, read_json
from llmops.untrusted_text import strip_unsafe
from llmops.urls import failure_reason, is_usable_key, without_secrets

#: Maximum size of a moderation service's answer, in bytes: one result has a few kilobytes.
MAX_ANSWER_BYTES = 1 << 20

#: Maximum size of a file with a head, in bytes: a thousand categories of a model with 1,024
#: dimensions take 20 MB.
MAX_HEAD_BYTES = 32 * 2**20

#: Length of a passage for an embedding model, in characters: such models read about 256 tokens.
PASSAGE = 800
#: Characters that a passage shares with the next, so that text at a boundary is read in one piece.
PASSAGE_OVERLAP = 100

#: Length of a passage for a guard model, in characters.
GUARD_PASSAGE = 4000
#: Maximum number of passages that a guard model reads at once for one filter.
MAX_GUARD_REQUESTS = 8
#: Maximum length of a guard model's verdict, in tokens: enough for a word such as `unsafe` and the
#: codes of a few categories.
MAX_VERDICT_TOKENS = 32

#: Pattern of a category as guard models write it, such as S1.
_CODE = re.compile(r"[A-Z]\d{1,2}")

#: Function that turns texts into vectors FP32 [len(texts), dimensions], given the model's name and
#: the texts.
Embed = Callable[[str, Sequence[str]], Awaitable[Any]]
#: Function that returns a model's answer, given the model's name, the message and the maximum
#: number of tokens.
Generate = Callable[[str, str, int], Awaitable[str]]


class ClassifierHead(NamedTuple):
    """A logistic regression for each category on a text's vector.

    The commands `llmops safety train` and `llmops router train` write such heads.

    Attributes:
        model: The embedding model whose vectors the head was trained on.
        weights: The weights [dimensions] by category, followed by the bias.
        thresholds: The score by category at and above which a text is a finding.
    """

    model: str
    weights: dict[str, list[FiniteFloat]]
    thresholds: dict[str, FiniteFloat]

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Return the weights and biases as FP64 [categories, dimensions + 1]."""
        return np.array([*self.weights.values()], np.float64)


def head_scores(matrix: NDArray[np.float64], vectors: Any) -> list[list[float]]:
    """Return the probability of each category for each of the vectors FP32 [vectors, dimensions].

    Raises:
        ValueError: The vectors and the head differ in their dimensions.
    """
    sums = np.asarray(vectors, np.float64) @ matrix[:, :-1].T + matrix[:, -1]
    scores: list[list[float]] = (1 / (1 + np.exp(-np.clip(sums, -50, 50)))).tolist()
    return scores


_HEAD = TypeAdapter(ClassifierHead)


def read_head(path: Path, kind: str = "safety head", command: str = "llmops safety train") -> ClassifierHead:
    """Return the classifier head in a file that `command` wrote.

    `kind` names the head in errors.

    Raises:
        InputError: The file cannot be read, or has no such head.
    """
    try:
        found = read_json(path, MAX_HEAD_BYTES)
        head = _HEAD.validate_python({name: found[name] for name in ClassifierHead._fields})
    except OSError as error:
        raise InputError(
            f"The {kind} {path} cannot be read ({error.strerror or error}); make one with `{command}`."
        ) from None
    except MALFORMED as error:
        reason = first_validation_error(error, "the file") if isinstance(error, ValidationError) else error
        raise InputError(f"{path} is not a {kind} ({reason}); make one with `{command}`.") from None
    if len({len(weights) for weights in head.weights.values()}) != 1 or not any(head.weights.values()):
        raise InputError(
            f"{path} is not a {kind}: its categories lack weights or differ in their number. Make it again."
        )
    return head


class ClassifierFilter(TextFilter):
    """A filter that judges a text by its embedding and a trained head."""

    def __init__(self, name: str, head: ClassifierHead, embed: Embed) -> None:
        self.name, self.categories = name, tuple(head.weights)
        self._head, self._matrix, self._embed = head, head.matrix, embed

    async def judge(self, text: str) -> Finding | None:
        try:
            vectors = await self._embed(self._head.model, _passages(text))
            highest = map(max, zip(*head_scores(self._matrix, vectors), strict=True))
        except (ApiError, ValueError) as error:
            raise FilterUnavailableError(str(error)) from error
        scores = dict(zip(self.categories, highest, strict=True))
        over = {name: score for name, score in scores.items() if score >= self._head.thresholds.get(name, 0.5)}
        return Finding(self.name, max(over, key=over.__getitem__), max(over.values())) if over else None


class GuardFilter(TextFilter):
    """A filter that asks a guard model whether a text is safe."""

    def __init__(self, name: str, category: str, settings: GuardSettings, generate: Generate) -> None:
        """Create the filter for the model in `settings`.

        Args:
            name: The filter's name in the settings.
            category: The category of findings for which the model names no category.
            settings: The guard model, its prompt and its categories.
            generate: Returns the answer of the model.
        """
        self.name, self._category, self._settings, self._generate = name, category, settings, generate
        self.categories = (*settings.categories.values(), category)
        # Passages take turns by tenant and text, so that many or long texts of one tenant do not
        # delay those of others.
        self._slots, self._texts = FairSlots(MAX_GUARD_REQUESTS), count()

    async def judge(self, text: str) -> Finding | None:
        passages, name = _passages(text, GUARD_PASSAGE), str(next(self._texts))
        try:
            async with asyncio.timeout(self._settings.timeout), asyncio.TaskGroup() as group:
                verdicts = [group.create_task(self._verdict(one, name)) for one in passages]
        except TimeoutError:
            raise FilterUnavailableError(
                f"{self._settings.model} gave no verdict within {self._settings.timeout:g} s"
            ) from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return next((found for one in verdicts if (found := one.result()) is not None), None)

    async def _verdict(self, passage: str, text: str) -> Finding | None:
        guard = self._settings
        try:
            async with self._slots.slot(JUDGED_TENANT.get(), 1, text):
                written = await self._generate(guard.model, guard.prompt.replace("{text}", passage), MAX_VERDICT_TOKENS)
        except ApiError as error:
            raise FilterUnavailableError(error.full_message) from error
        verdict = written.strip()
        if verdict.lower().startswith(guard.unsafe.lower()):
            rest = verdict[len(guard.unsafe) :].replace(",", " ").split()
            code = rest[0] if rest else ""
            # Only known codes count as categories: a text may make the model write any word, and
            # each category has its own count.
            unnamed = code if _CODE.fullmatch(code) else self._category
            return Finding(self.name, guard.categories.get(code, unnamed))
        if verdict.lower().startswith(guard.safe.lower()):
            return None
        raise FilterUnavailableError(f"{guard.model} wrote neither {guard.safe} nor {guard.unsafe}")


class ModerationFilter(TextFilter):
    """A filter that asks a server for `POST /v1/moderations`: OpenAI's, or a compatible server."""

    categories = ("flagged",)

    def __init__(self, name: str, url: str, *, model: str | None, key_env: str | None, timeout: float) -> None:
        """Create the filter for the server at `url`.

        Args:
            name: The filter's name in the settings.
            url: The address of the endpoint.
            model: The model to name in requests; None for the server's default.
            key_env: The environment variable that holds the server's API key; None without a key.
            timeout: Seconds that one request may take.

        Raises:
            InputError: The environment variable has no usable key.
        """
        self.name, self._url, self._model, self._timeout = name, url, model, timeout
        key = os.environ.get(key_env, "").strip() if key_env else ""
        if key_env and not is_usable_key(key):
            kind = "a key of printable ASCII characters" if key else "a key"
            raise InputError(
                f"The safety filter {name} needs {kind} in the environment variable {key_env}; set this variable."
            )
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = fair_client(timeout=timeout, headers={**headers, "accept-encoding": "identity"})

    async def judge(self, text: str) -> Finding | None:
        body = {"input": text, **({"model": self._model} if self._model else {})}
        try:
            async with asyncio.timeout(self._timeout), self._client.stream("POST", self._url, json=body) as response:
                response.raise_for_status()
                answer = bytearray()
                async for chunk in response.aiter_raw():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise ValueError("the answer is too long for a moderation")
            return self._finding(parse_json(answer, surrogates=True))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, *MALFORMED) as error:
            raise FilterUnavailableError(f"{without_secrets(self._url)}: {failure_reason(error)}") from error

    async def close(self) -> None:
        await self._client.aclose()

    def _finding(self, answer: Any) -> Finding | None:
        result = answer["results"][0]
        if not result["flagged"]:
            return None
        scores = result.get("category_scores") or {}
        found = [name for name, flagged in (result.get("categories") or {}).items() if flagged] or ["flagged"]
        category = max(found, key=lambda name: float(scores.get(name) or 0.0))
        # the audit log stores the category, and callers read it
        return Finding(self.name, strip_unsafe(category[:64]) or "flagged", float(scores.get(category) or 1.0))


def _passages(text: str, size: int = PASSAGE) -> list[str]:
    """Return the overlapping passages of a text, each of at most `size` characters."""
    return [text[at : at + size] for at in range(0, max(1, len(text) - PASSAGE_OVERLAP), size - PASSAGE_OVERLAP)]
