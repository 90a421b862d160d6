"""The request and response bodies of the roll-out API.

This module imports no database library, so that the CLI can use it without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from llmops.control.admin.schemas import AdminRequest, AdminSchema, AuditEntryRead, SafeText, Timestamp
from llmops.control.rollouts.analysis import Condition
from llmops.errors import InputError
from llmops.gateway.replica_address import parse_replica
from llmops.urls import http_url_problem

if TYPE_CHECKING:
    from llmops.store.rollouts import Rollout

#: Maximum seconds of a setting. More than a month is a mistake, and a huge number of seconds
#: exceeds what dates can express.
MAX_SECONDS = 30 * 24 * 3600.0

#: Maximum number of a version's replicas, the same as the gateways' maximum for a DNS name.
MAX_REPLICAS = 256

#: Maximum number of conditions, because control queries Prometheus for all of them at once.
MAX_CONDITIONS = 16

#: The name of a model or version. Names of folders contain it.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


def _check_url(url: str) -> str:
    if url and http_url_problem(url):
        raise ValueError("it must be a URL with http or https")
    return url


#: A URL that control requests, or an empty text.
Url = Annotated[str, Field(max_length=2000), AfterValidator(_check_url)]


def _check_replica(address: str) -> str:
    parse_replica(address)
    return address


#: An address in the form of the setting `replicas`. Checked before it is stored, because every
#: gateway reads it.
Replica = Annotated[SafeText, Field(max_length=500), AfterValidator(_check_replica)]

#: A PromQL condition of a roll-out.
ConditionText = Annotated[str, Field(max_length=4000)]

#: Actions that a person can take on a roll-out in progress.
RolloutAction = Literal["promote", "promote fully", "pause", "resume", "rollback"]


class RolloutSettings(AdminRequest):
    """The options of a roll-out.

    Attributes:
        percent: Percentage of requests that the candidate gets in the first step.
        auto: Let the judge change the weights. Otherwise, its verdict is only shown.
        approve: Wait for a person's approval after each step that the judge has passed.
        drain_timeout: Seconds that running answers have before replicas are stopped.
        keep_old: Seconds for which the old replicas are kept after the last step. Until then, a
            rollback only changes the weights.
        allow_capacity_loss: Stop old replicas first if the new replicas have no room beside them.
        webhook: URL to which every transition is sent, or an empty string.
        analysis: PromQL conditions, such as `EXPRESSION < 0.1`, that must hold besides the judge.
        prometheus: URL of the Prometheus that has the data of `analysis`.
        min_requests: Number of the candidate's requests in a step before the judge can pass it.
        min_seconds: Duration of a step in seconds before the judge can pass the step.
        quality_tolerance: Mean score that the candidate may lose on golden prompts.
        twin: Start a baseline twin if there is room: replicas of the stable version whose cache is
            as cold as the candidate's. The candidate is compared with the twin.
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
        """Return the settings of a stored roll-out.

        Settings that this version lacks are left out.
        """
        return cls(**{name: value for name, value in rollout.settings.items() if name in cls.model_fields})


class RolloutCreate(RolloutSettings):
    """A new roll-out, from an engine folder or to replicas that already run."""

    model: Name
    name: Name
    engine: str = ""
    replicas: tuple[Replica, ...] = Field(default=(), max_length=MAX_REPLICAS)


class RolloutChange(AdminRequest):
    """An action on the open roll-out of a model."""

    model: str
    action: RolloutAction
    reason: str = ""


class RolloutQuery(AdminRequest):
    """The query of the roll-outs of one or all models, the newest first."""

    model: str | None = None


class PinCreate(AdminRequest):
    """A key, and the version that answers its requests. A null version removes the pin."""

    model: str
    key: str
    version: str | None = None


class VersionRead(AdminSchema):
    """A version of a model. `weight` is its percentage of the requests."""

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
