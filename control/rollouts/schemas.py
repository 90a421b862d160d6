"""Request and response bodies of the roll-out API. Nothing here imports a database library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from llmops.control.admin.schemas import AdminRequest, AdminSchema, AuditEntryRead, SafeText, Timestamp
from llmops.control.rollouts.analysis import Condition
from llmops.errors import InputError
from llmops.gateway.replica_address import parse_replica
from llmops.urls import http_url_problem

if TYPE_CHECKING:
    from llmops.store.rollouts import Rollout

#: Seconds of a setting: more than a month is a mistake, and a number without end has no date.
MAX_SECONDS = 30 * 24 * 3600.0

#: Replicas of a version: as many as gateways use of a DNS name.
MAX_REPLICAS = 256

#: Conditions of a roll-out. Control asks Prometheus for all of them at once.
MAX_CONDITIONS = 16

#: A name of a model or a version, which is also part of a folder's.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


def _check_url(url: str) -> str:
    if url and http_url_problem(url):
        raise ValueError("it must be a URL with http or https")
    return url


#: A URL that control asks or tells, or an empty text.
Url = Annotated[str, Field(max_length=2000), AfterValidator(_check_url)]


def _check_replica(address: str) -> str:
    parse_replica(address)
    return address


#: An address as in the setting `replicas`. Every gateway reads it, so that a wrong one must not get
#: into the store.
Replica = Annotated[SafeText, Field(max_length=500), AfterValidator(_check_replica)]

#: A condition in PromQL.
ConditionText = Annotated[str, Field(max_length=4000)]

#: What a person can do with a roll-out in progress.
RolloutAction = Literal["promote", "promote fully", "pause", "resume", "rollback"]


class RolloutSettings(AdminRequest):
    """The options of a roll-out.

    Attributes:
        percent: Percent of the requests that the candidate gets in the first step.
        auto: The judge moves the weights; otherwise its verdict is only shown.
        approve: Every step waits for a person after the judge has passed it.
        drain_timeout: Seconds that running answers have before replicas are stopped.
        keep_old: Seconds for which the old replicas are kept after the last step: a rollback is a
            change of weights until then.
        allow_capacity_loss: Stop old replicas first where there is no room beside them.
        webhook: A URL that gets every transition, or an empty string.
        analysis: PromQL conditions, such as `EXPRESSION < 0.1`, that must hold besides the judge.
        prometheus: The URL of the Prometheus that knows them.
        min_requests: Requests of the candidate in a step before the judge can pass it.
        min_seconds: Seconds of a step before the judge can pass it.
        quality_tolerance: Mean score that the candidate may lose on golden prompts.
        twin: Start a baseline twin where there is room: replicas of the stable version with as cold
            a cache as the candidate's, with which the candidate is compared.
    """

    percent: float = Field(default=5.0, gt=0, le=100)
    auto: bool = False
    approve: bool = False
    drain_timeout: float = Field(default=300.0, ge=0, le=MAX_SECONDS)
    keep_old: float = Field(default=1800.0, ge=0, le=MAX_SECONDS)
    allow_capacity_loss: bool = False
    webhook: Url = ""
    analysis: tuple[ConditionText, ...] = Field(default=(), max_length=MAX_CONDITIONS)
    prometheus: Url = ""
    min_requests: int = Field(default=300, ge=1, le=10**9)
    min_seconds: float = Field(default=60.0, ge=0, le=MAX_SECONDS)
    quality_tolerance: float = Field(default=0.0, ge=0, le=1)
    twin: bool = False

    @field_validator(
        "percent", "drain_timeout", "keep_old", "min_requests", "min_seconds", "quality_tolerance", mode="before"
    )
    @classmethod
    def _default(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the default of a number that is null."""
        return cls.model_fields[info.field_name or ""].default if value is None else value

    @model_validator(mode="after")
    def _check_conditions(self) -> Self:
        for text in self.analysis:
            Condition.parse(text)
        if bool(self.analysis) != bool(self.prometheus):
            raise InputError(
                "Conditions and the Prometheus that knows their values belong together; give both --analysis 'QUERY < "
                "0.1' and --prometheus http://HOST:9090."
            )
        return self

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutSettings:
        """Return the settings of a stored roll-out. Settings of another llmops are left out."""
        return cls(**{name: value for name, value in rollout.settings.items() if name in cls.model_fields})


class RolloutCreate(RolloutSettings):
    """A roll-out to start: of an engine folder, or to replicas that already run."""

    model: Name
    name: Name
    engine: str = ""
    replicas: tuple[Replica, ...] = Field(default=(), max_length=MAX_REPLICAS)


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
