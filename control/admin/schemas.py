"""What crosses the border of administration: the admin API's JSON, which is also what `--json` prints.

In a change, a field that is absent stays as it is, and null takes a limit away.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from llmops.control.admin.money import Dollars, to_dollars, to_micros
from llmops.gateway.http.request_body import FailFastModel
from llmops.untrusted_text import is_safe_text


def _to_utc(at: datetime) -> datetime:
    """Without a zone it is UTC's."""
    if at.tzinfo is None:
        return at.replace(tzinfo=UTC)
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise ValueError("this time is beyond the calendar") from None


# what JSON can say, and a database cannot keep
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
Timestamp = Annotated[datetime, AfterValidator(_to_utc)]
UsageGroup = Literal["day", "tenant", "user", "model", "key"]


class AdminSchema(FailFastModel):
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


class AdminRequest(AdminSchema):
    """A question or a change. Its texts are stored and shown to others, so they hold no character that a terminal obeys
    or a reader cannot see."""

    @field_validator("*")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and not is_safe_text(text) for text in texts):
            raise ValueError("a text has no control characters, and none that are invisible or turn others around")
        return value


class EmptyRequest(AdminSchema):
    """Nothing to say."""


class BudgetFields(AdminSchema):
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
    def _agree(self) -> BudgetFields:
        usd, micros = self.usd, self.micros
        if usd is None and micros is None:
            raise ValueError("a budget is in US dollars: give usd, or micros")
        if usd is not None and micros is not None and to_micros(usd) != micros:
            raise ValueError("usd and micros are not the same amount; give one of them")
        object.__setattr__(self, "micros", to_micros(usd or Decimal(0)) if micros is None else micros)
        object.__setattr__(self, "usd", to_dollars(self.micros or 0))
        return self


class LimitFields(AdminSchema):
    """Requests and tokens per minute, requests at once, and money; null is without a limit."""

    rpm: int | None = None
    tpm: int | None = None
    concurrent: int | None = None
    budget: BudgetFields | None = None


class TenantCreate(LimitFields, AdminRequest):
    id: str


class TenantReference(AdminRequest):
    tenant: str


class TenantUpdate(LimitFields, AdminRequest):
    tenant: str


class TenantListQuery(AdminRequest):
    """`all`: also deleted ones."""

    all: bool = False


class TenantRead(AdminSchema):
    """Who pays. Its limits hold for all of its keys together."""

    id: str
    rpm: int | None
    tpm: int | None
    concurrent: int | None
    budget: BudgetFields | None
    created_at: Timestamp
    deleted_at: Timestamp | None


class KeyFields(LimitFields):
    """What is decided about a key. `models` null: all of them."""

    name: str | None = None
    tier: str | None = None
    scopes: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    expires_at: Timestamp | None = None


class KeyCreate(KeyFields, AdminRequest):
    """`user`: the address of its user, made where there is none."""

    tenant: str
    user: str


class KeyReference(AdminRequest):
    """`key`: its id, or the SHA-256 (hex) of the key itself, which has no place in a URL."""

    key: str


class KeyRevoke(KeyReference):
    """`now`: also end the key's running answers."""

    now: bool = False


class KeyUpdate(KeyFields, AdminRequest):
    key: str


class KeyRotate(AdminRequest):
    """For how many seconds the present secret works on."""

    key: str
    overlap_seconds: float = Field(default=86_400.0, ge=0, le=3650 * 86_400)


class KeyListQuery(AdminRequest):
    """`all`: also those that are refused."""

    tenant: str | None = None
    user: str | None = None
    all: bool = False


class KeyRead(AdminSchema):
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
    budget: BudgetFields | None
    created_at: Timestamp
    expires_at: Timestamp | None
    revoked_at: Timestamp | None
    previous_until: Timestamp | None
    state: str


class KeyWithSecret(KeyRead):
    """`key`: the key itself, told this once."""

    key: str


class KeyDetails(KeyRead):
    """`spent_micros`: of its budget, in the present period."""

    spent_micros: int | None
    tenant_limits: LimitFields


class PriceCreate(AdminRequest):
    """US dollars per million tokens; `cached` is that of input where it is not given, `from` now."""

    model: str
    input: Dollars
    cached: Dollars | None = None
    output: Dollars
    begins: Timestamp | None = Field(default=None, validation_alias="from", serialization_alias="from")


class PriceListQuery(AdminRequest):
    """`at`: only those in force then."""

    model: str | None = None
    at: Timestamp | None = None


class PriceRead(AdminSchema):
    """US dollars per million tokens, until the model's next price."""

    id: str
    model: str
    begins: Timestamp = Field(validation_alias="from", serialization_alias="from")
    input: Dollars
    cached: Dollars
    output: Dollars
    in_force: bool


class DateRange(AdminSchema):
    """Days of UTC, both included."""

    first: date = Field(validation_alias="from", serialization_alias="from")
    last: date = Field(validation_alias="to", serialization_alias="to")


class UsageReportQuery(AdminRequest):
    """Of one tenant, user, key or model; `from` the first of the month unless given, `to` today."""

    tenant: str | None = None
    user: str | None = None
    key: str | None = None
    model: str | None = None
    first: date | None = Field(default=None, validation_alias="from", serialization_alias="from")
    last: date | None = Field(default=None, validation_alias="to", serialization_alias="to")
    by: tuple[UsageGroup, ...] = ()


class UsageTotals(AdminSchema):
    """`input_tokens` include the cached ones."""

    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_micros: int
    cost_usd: float


class UsageLine(UsageTotals):
    """The groups that were asked for are set, the others absent."""

    day: str | None = None
    tenant: str | None = None
    user: str | None = None
    model: str | None = None
    key: str | None = None


class UsageReport(UsageTotals):
    period: DateRange
    lines: tuple[UsageLine, ...]

    def data(self) -> dict[str, Any]:
        found = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {"period": found.pop("period"), **found}


class ReconciliationRequest(AdminSchema):
    """`served`: tokens of all answers that the engines of a model have ended, as they say themselves."""

    served: dict[str, int] = Field(default_factory=dict)


class MissingEvents(AdminSchema):
    """Events `first` to `last` of a gateway worker have not arrived, while later ones have; first seen at `since`."""

    gateway: str
    first: int
    last: int
    since: Timestamp


class EngineTokens(AdminSchema):
    """`served` as its engines say, `billed` as the ledger has them: both since they began to count.

    `unbilled`: served and not billed since the report before, None for the first; tokens that end answers, and those
    for who had left, are among them.
    """

    model: str
    served: int
    billed: int
    unbilled: int | None = None


class Reconciliation(AdminSchema):
    """`missing`: events in all `gaps`, of which at most a thousand are named."""

    at: Timestamp
    gateways: int
    missing: int
    gaps: tuple[MissingEvents, ...] = ()
    engines: tuple[EngineTokens, ...] = ()


class DeadLetterListQuery(AdminRequest):
    """The newest `limit` of the events that are on no bill."""

    limit: int = Field(default=100, ge=1, le=10_000)


class DeadLetterRead(AdminSchema):
    """A record that came `count` times, the last time at `last_at`. `signed`: a gateway wrote it. `value`: its text,
    escaped and cut.
    """

    reason: str
    source: str
    signed: bool
    count: int
    last_at: Timestamp
    value: str


class AuditQuery(AdminRequest):
    """Of one tenant, of actions that begin so (`key.`, `access.`), since then; the newest `limit`."""

    tenant: str | None = None
    action: str | None = None
    since: Timestamp | None = None
    limit: int = Field(default=100, ge=1, le=10_000)


class AuditEntryRead(AdminSchema):
    """`actor`: `cli:` and the system's user, `key:` or `user:` and an id, `address:` and a stranger's."""

    id: str
    created_at: Timestamp
    actor: str
    action: str
    subject: str
    tenant: str | None
    detail: dict[str, Any]
