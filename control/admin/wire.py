"""What crosses the border of administration: the admin API's JSON, which is also what `--json` prints.

In a change, a field that is absent stays as it is, and null takes a limit away.
"""

from __future__ import annotations

import re
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from llmops.control.admin.money import Dollars, dollars_of, micros_of
from llmops.gateway.http.body import Received
from llmops.texts import is_plain


def _utc(at: datetime) -> datetime:
    """Without a zone it is UTC's."""
    if at.tzinfo is None:
        return at.replace(tzinfo=timezone.utc)
    try:
        return at.astimezone(timezone.utc)
    except OverflowError:
        raise ValueError("this time is beyond the calendar") from None


# what JSON can say, and a database cannot keep
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
Moment = Annotated[datetime, AfterValidator(_utc)]
Group = Literal["day", "tenant", "user", "model", "key"]


class Wire(Received):
    """Unknown fields are refused: a limit that is misspelt must not be no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @field_validator("*")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and _UNSTORABLE.search(text) for text in texts):
            raise ValueError("a text has no NUL characters and no halves of surrogate pairs")
        return value

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return self.model_dump(mode="json", by_alias=True)


class Asked(Wire):
    """A question or a change. Its texts are stored and shown to others, so they hold no character that a terminal obeys
    or a reader cannot see."""

    @field_validator("*")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and not is_plain(text) for text in texts):
            raise ValueError("a text has no control characters, and none that are invisible or turn others around")
        return value


class Nothing(Wire):
    """Nothing to say."""


class Budget(Wire):
    """US dollars per day, week (from Monday) or month, by UTC's calendar. One of `usd` and `micros` is enough."""

    usd: Dollars | None = None
    micros: int | None = None
    period: Literal["day", "week", "month"]

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError('a budget is US dollars per period, as {"usd": 50, "period": "month"}')
        return data

    @model_validator(mode="after")
    def _agree(self) -> Budget:
        usd, micros = self.usd, self.micros
        if usd is None and micros is None:
            raise ValueError("a budget is in US dollars: give usd, or micros")
        if usd is not None and micros is not None and micros_of(usd) != micros:
            raise ValueError("usd and micros are not the same amount; give one of them")
        object.__setattr__(self, "micros", micros_of(usd or Decimal(0)) if micros is None else micros)
        object.__setattr__(self, "usd", dollars_of(self.micros or 0))
        return self


class LimitFields(Wire):
    """Requests and tokens per minute, requests at once, and money; null is without a limit."""

    rpm: int | None = None
    tpm: int | None = None
    concurrent: int | None = None
    budget: Budget | None = None


class NewTenant(LimitFields, Asked):
    id: str


class TenantName(Asked):
    tenant: str


class TenantChange(LimitFields, Asked):
    tenant: str


class TenantsWanted(Asked):
    """`all`: also deleted ones."""

    all: bool = False


class Tenant(Wire):
    """Who pays. Its limits hold for all of its keys together."""

    id: str
    rpm: int | None
    tpm: int | None
    concurrent: int | None
    budget: Budget | None
    created_at: Moment
    deleted_at: Moment | None


class KeyFields(LimitFields):
    """What is decided about a key. `models` null: all of them."""

    name: str | None = None
    tier: str | None = None
    scopes: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    expires_at: Moment | None = None


class NewKey(KeyFields, Asked):
    """`user`: the address of its user, made where there is none."""

    tenant: str
    user: str


class KeyName(Asked):
    """`key`: its id, or the SHA-256 (hex) of the key itself, which has no place in a URL."""

    key: str


class Revocation(KeyName):
    """`now`: also end the key's running answers."""

    now: bool = False


class KeyChange(KeyFields, Asked):
    key: str


class Rotation(Asked):
    """For how many seconds the present secret works on."""

    key: str
    overlap_seconds: float = Field(default=86_400.0, ge=0, le=3650 * 86_400)


class KeysWanted(Asked):
    """`all`: also those that are refused."""

    tenant: str | None = None
    user: str | None = None
    all: bool = False


class Key(Wire):
    """`begins`: its first characters, for people. `state`: active, or why it is refused."""

    id: str
    begins: str
    name: str | None
    tenant: str
    user: str
    tier: str
    scopes: tuple[str, ...]
    models: tuple[str, ...] | None
    rpm: int | None
    tpm: int | None
    concurrent: int | None
    budget: Budget | None
    created_at: Moment
    expires_at: Moment | None
    revoked_at: Moment | None
    previous_until: Moment | None
    state: str


class MadeKey(Key):
    """`key`: the key itself, told this once."""

    key: str


class ShownKey(Key):
    """`spent_micros`: of its budget, in the present period."""

    spent_micros: int | None
    tenant_limits: LimitFields


class NewPrice(Asked):
    """US dollars per million tokens; `cached` is that of input where it is not given, `from` now."""

    model: str
    input: Dollars
    cached: Dollars | None = None
    output: Dollars
    begins: Moment | None = Field(default=None, validation_alias="from", serialization_alias="from")


class PricesWanted(Asked):
    """`at`: only those in force then."""

    model: str | None = None
    at: Moment | None = None


class Price(Wire):
    """US dollars per million tokens, until the model's next price."""

    id: str
    model: str
    begins: Moment = Field(validation_alias="from", serialization_alias="from")
    input: Dollars
    cached: Dollars
    output: Dollars
    in_force: bool


class Period(Wire):
    """Days of UTC, both included."""

    first: date = Field(validation_alias="from", serialization_alias="from")
    last: date = Field(validation_alias="to", serialization_alias="to")


class UsageWanted(Asked):
    """Of one tenant, user, key or model; `from` the first of the month unless given, `to` today."""

    tenant: str | None = None
    user: str | None = None
    key: str | None = None
    model: str | None = None
    first: date | None = Field(default=None, validation_alias="from", serialization_alias="from")
    last: date | None = Field(default=None, validation_alias="to", serialization_alias="to")
    by: tuple[Group, ...] = ()


class Counts(Wire):
    """`input_tokens` include the cached ones."""

    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_micros: int
    cost_usd: float


class UsageLine(Counts):
    """The groups that were asked for are set, the others absent."""

    day: str | None = None
    tenant: str | None = None
    user: str | None = None
    model: str | None = None
    key: str | None = None


class Usage(Counts):
    period: Period
    lines: tuple[UsageLine, ...]

    def data(self) -> dict[str, Any]:
        found = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {"period": found.pop("period"), **found}


class ReconciliationWanted(Wire):
    """`served`: tokens of all answers that the engines of a model have ended, as they say themselves."""

    served: dict[str, int] = Field(default_factory=dict)


class MissingEvents(Wire):
    """Events `first` to `last` of a gateway worker have not arrived, while later ones have; first seen at `since`."""

    gateway: str
    first: int
    last: int
    since: Moment


class EngineTokens(Wire):
    """`served` as its engines say, `billed` as the ledger has them: both since they began to count.

    `unbilled`: served and not billed since the report before, None for the first; tokens that end answers, and those
    for who had left, are among them.
    """

    model: str
    served: int
    billed: int
    unbilled: int | None = None


class Reconciliation(Wire):
    """`missing`: events in all `gaps`, of which at most a thousand are named."""

    at: Moment
    gateways: int
    missing: int
    gaps: tuple[MissingEvents, ...] = ()
    engines: tuple[EngineTokens, ...] = ()


class ParkedWanted(Asked):
    """The newest `limit` of the events that are on no bill."""

    limit: int = Field(default=100, ge=1, le=10_000)


class ParkedEvent(Wire):
    """A record that came `count` times, the last time at `last_at`. `signed`: a gateway wrote it. `value`: its text,
    escaped and cut.
    """

    reason: str
    source: str
    signed: bool
    count: int
    last_at: Moment
    value: str


class AuditWanted(Asked):
    """Of one tenant, of actions that begin so (`key.`, `access.`), since then; the newest `limit`."""

    tenant: str | None = None
    action: str | None = None
    since: Moment | None = None
    limit: int = Field(default=100, ge=1, le=10_000)


class AuditEntry(Wire):
    """`actor`: `cli:` and the system's user, `key:` or `user:` and an id, `address:` and a stranger's."""

    id: str
    created_at: Moment
    actor: str
    action: str
    subject: str
    tenant: str | None
    detail: dict[str, Any]
