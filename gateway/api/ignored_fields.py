"""Detection of request fields that have no effect.

Such fields are reported to the client, counted, and rejected if the setting `strict_fields` is on.
Tools that are not offered to the model are reported to the client, too.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.schemas.request_fields import RequestModel

log = logging.getLogger(__name__)

#: Fields of chat and text completions that are accepted without effect, so that clients which
#: always send them work.
COMMON_IGNORED_FIELDS = frozenset(
    {
        *("priority", "cache_salt", "include_stop_str_in_output"),
        *("stream_options.include_obfuscation", "stream_options.continuous_usage_stats"),
    }
)
#: Maximum number of unknown fields that are reported per request. Bounds the response's headers,
#: because a client may send any number of fields.
MAX_UNKNOWN_FIELDS = 16
#: Maximum number of field names that are logged, each once. Bounds the log and the memory, because
#: clients choose the names.
MAX_LOGGED_FIELDS = 256
_logged: set[str] = set()


def report_ignored_fields(
    context: RequestContext,
    service: AppState,
    body: RequestModel,
    known: frozenset[str] = frozenset(),
    *,
    extra: RequestModel | None = None,
) -> None:
    """Report fields without effect in the response's headers, and count them.

    Args:
        context: The request's context, which receives the headers.
        service: The gateway's shared state, with the metrics and the setting `strict_fields`.
        body: The request's body.
        known: The fields that are accepted without effect. Nested fields have dots:
            `text.verbosity`.
        extra: The model whose extra fields are unknown fields. `body` by default.

    Raises:
        InvalidRequestError: A field is unknown, and `strict_fields` is set.
    """
    fields = _fields(known)
    present = body.model_fields_set & fields.keys()
    ignored = sorted(name for field in present for name in fields[field] if _is_set(body, name)) if present else []
    extras = (extra or body).model_extra
    unknown = sorted(name for name, value in extras.items() if value is not None) if extras else []
    if not ignored and not unknown:
        return
    context.ignored_fields += ignored + [_printable(name) for name in unknown[:MAX_UNKNOWN_FIELDS]]
    for name in ignored:
        service.metrics.ignored.labels(name).inc()
    if unknown:
        # All unknown fields share one label, because clients must not be able to create labels.
        service.metrics.ignored.labels("unknown").inc(len(unknown))
        _warn_of_unknown(context, unknown, (*type(body).model_fields, *type(extra or body).model_fields), service)


def _warn_of_unknown(context: RequestContext, unknown: Sequence[str], fields: Sequence[str], service: AppState) -> None:
    """Warn the client of each unknown field, and log each field name once.

    `fields` has the names of the known fields, of which a similar name is suggested.

    Raises:
        InvalidRequestError: The setting `strict_fields` is set.
    """
    for name in unknown[:MAX_UNKNOWN_FIELDS]:
        shown = _printable(name)
        nearest = difflib.get_close_matches(name[:64], fields, n=1, cutoff=0.75)
        suggestion = f"; did you mean '{nearest[0]}'?" if nearest else "."
        if service.strict_fields:
            raise InvalidRequestError(f"Unknown field '{shown}'{suggestion}", param=shown, code="unknown_parameter")
        context.warnings.append(f"The field '{shown}' is unknown and was ignored{suggestion}")
        if shown not in _logged and len(_logged) < MAX_LOGGED_FIELDS:
            _logged.add(shown)
            log.warning(
                "Request %s on %s: the field %s is unknown and was ignored%s It is not logged again; "
                "set strict_fields to reject such requests.", context.request_id, context.route, shown, suggestion,
            )  # fmt: skip


def report_dropped_tools(context: RequestContext, kinds: Sequence[str]) -> None:
    """Warn the client of tools that are not offered to the model.

    Args:
        context: The request's context, which receives the warnings.
        kinds: The types of the tools.
    """
    for kind in list(dict.fromkeys(kinds))[:MAX_UNKNOWN_FIELDS]:
        context.warnings.append(
            f"The tool '{_printable(kind)}' was not offered to the model, because the gateway runs no tools itself."
        )


@cache
def _fields(known: frozenset[str]) -> dict[str, list[str]]:
    """Return the dotted names of `known` by the name of their outermost field."""
    fields: dict[str, list[str]] = {}
    for name in known:
        fields.setdefault(name.partition(".")[0], []).append(name)
    return fields


def _is_set(body: RequestModel, name: str) -> bool:
    value: Any = body
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if value is None:
            return False
    return True


def _printable(name: str) -> str:
    return name[:64].encode("ascii", "backslashreplace").decode() if name.isprintable() else "?"
