"""Request and response bodies of the roll-out API. Nothing here imports a database library."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from llmops.control.admin.schemas import AdminRequest, AdminSchema, AuditEntryRead, Timestamp

#: Seconds of a setting: more than a month is a mistake, and a number without end has no date.
MAX_SECONDS = 30 * 24 * 3600.0

#: A name of a model or a version, which is also part of a folder's.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0):
        raise ValueError("it must be a URL with http or https")
    return url


#: A URL that control asks or tells, or an empty text.
Url = Annotated[str, Field(max_length=2000), AfterValidator(_check_url)]

#: What a person can do with a roll-out in progress.
RolloutAction = Literal["promote", "promote fully", "pause", "resume", "rollback"]


class RolloutCreate(AdminRequest):
    """A roll-out to start: of an engine folder, or to replicas that already run."""

    model: Name
    name: Name
    engine: str = ""
    replicas: tuple[str, ...] = ()
    percent: float | None = Field(default=None, gt=0, le=100)
    auto: bool = False
    approve: bool = False
    drain_timeout: float | None = Field(default=None, ge=0, le=MAX_SECONDS)
    keep_old: float | None = Field(default=None, ge=0, le=MAX_SECONDS)
    allow_capacity_loss: bool = False
    webhook: Url = ""
    analysis: tuple[str, ...] = ()
    prometheus: Url = ""
    min_requests: int | None = Field(default=None, ge=1, le=10**9)
    min_seconds: float | None = Field(default=None, ge=0, le=MAX_SECONDS)
    quality_tolerance: float | None = Field(default=None, ge=0, le=1)
    twin: bool = False


class RolloutChange(AdminRequest):
    """An action on the roll-out of a model."""

    model: str
    action: RolloutAction
    reason: str = ""


class RolloutQuery(AdminRequest):
    """Query of the roll-outs of one model or of all models, the newest first."""

    model: str | None = None


class PinCreate(AdminRequest):
    """A key and the version that answers its requests. Null removes the pin."""

    model: str
    key: str
    version: str | None = None


class VersionRead(AdminSchema):
    """A version of a model. `weight` is percent of the requests."""

    name: str
    engine: str
    replicas: tuple[str, ...]
    weight: float
    state: str


class RolloutRead(AdminSchema):
    """A roll-out, the versions of its model, and the judge's latest verdict."""

    id: str
    model: str
    stable: str
    candidate: str
    state: str
    percent: float
    reason: str
    open: bool
    started_at: Timestamp
    changed_at: Timestamp
    settings: dict[str, Any]
    verdict: dict[str, Any] | None
    versions: tuple[VersionRead, ...]


class RolloutHistory(AdminSchema):
    """The transitions of a model's roll-outs with their actors, the newest first."""

    entries: tuple[AuditEntryRead, ...]
