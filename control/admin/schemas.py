"""The request and response bodies of the admin API. The CLI prints them with `--json`.

In an update, a field that is absent is left unchanged, and null removes a limit. This module
imports no database library, so that the CLI can use a remote admin API without installing one.
"""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from llmops.errors import InputError
from llmops.gateway.http.request_body import FailFastModel
from llmops.units import MICROS_PER_USD
from llmops.untrusted_text import is_safe_text


def to_micros(dollars: Decimal) -> int:
    """Return US dollars as whole micro-dollars."""
    return int(dollars * MICROS_PER_USD)


def to_dollars(micros: int) -> Decimal:
    """Return whole micro-dollars as US dollars."""
    return Decimal(micros) / MICROS_PER_USD


def _to_utc(time: datetime) -> datetime:
    """Return a time in UTC. A time without a zone is taken as UTC."""
    if time.tzinfo is None:
        return time.replace(tzinfo=UTC)
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError("this time is outside the years 1 to 9999") from None


def check_visible(value: Any) -> Any:
    """Return `value`. Raise ValueError for a text, or a tuple with one, that is not safe to show."""
    texts = value if isinstance(value, tuple) else (value,)
    if not all(is_safe_text(text) for text in texts if isinstance(text, str)):
        raise ValueError(
            "the text has a control character, an invisible character, or a character that reverses the direction of "
            "text; remove it"
        )
    return value


# Money is parsed exactly from JSON, and written as a number.
Dollars = Annotated[
    Decimal,
    Field(ge=0, max_digits=30, decimal_places=6, description="US dollars, with at most six decimals."),
    PlainSerializer(float, return_type=float, when_used="json"),
]
Timestamp = Annotated[datetime, AfterValidator(_to_utc)]
UsageGroup = Literal["day", "tenant", "user", "model", "key"]
# A text in a request that is outside of a body, such as an id in the path.
SafeText = Annotated[str, AfterValidator(check_visible)]


class AdminSchema(FailFastModel):
    """The base class of the bodies of the admin API.

    Unknown fields are rejected, so that a misspelt limit is not silently ignored.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    def data(self) -> dict[str, Any]:
        """Return the object as JSON data."""
        return self.model_dump(mode="json", by_alias=True)


class AdminRequest(AdminSchema):
    """The base class of the request bodies of the admin API.

    Texts are stored and shown to other people, so they must not contain characters that a terminal
    interprets or a reader cannot see.
    """

    _visible = field_validator("*")(check_visible)


class BudgetFields(AdminSchema):
    """A budget in US dollars per day, week (from Monday) or month, in UTC.

    Give either `usd` or `micros`.
    """

    usd: Dollars | None = None
    micros: int | None = None
    period: Literal["day", "week", "month"]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        usd, micros = self.usd, self.micros
        if usd is None and micros is None:
            raise ValueError("a budget needs an amount; give `usd`, or `micros` (millionths of a dollar)")
        if usd is not None and micros is not None and to_micros(usd) != micros:
            raise ValueError("usd and micros are not the same amount; give one of them")
        object.__setattr__(self, "micros", to_micros(usd or Decimal(0)) if micros is None else micros)
        object.__setattr__(self, "usd", to_dollars(self.micros or 0))
        return self


class LimitFields(AdminSchema):
    """The limits of a key or tenant. Null means unlimited.

    The limits are requests and tokens per minute, concurrent requests, and a budget.
    """

    rpm: int | None = None
    tpm: int | None = None
    concurrent: int | None = None
    budget: BudgetFields | None = None


class TenantUpdate(LimitFields, AdminRequest):
    """Changes to the limits of a tenant."""


class TenantCreate(TenantUpdate):
    """A new tenant and its limits."""

    id: str


class TenantListQuery(AdminRequest):
    """The query of a list of tenants. `all` includes deleted tenants."""

    all: bool = False


class TenantRead(AdminSchema):
    """A tenant. Its limits apply to all of its keys together."""

    id: str
    rpm: int | None
    tpm: int | None
    concurrent: int | None
    budget: BudgetFields | None
    created_at: Timestamp
    deleted_at: Timestamp | None


class DamagedRow(AdminSchema):
    """A key that was revoked, or a tenant that was deleted, of which a value is damaged."""

    id: str
    damaged: Literal[True] = True


class KeyUpdate(LimitFields, AdminRequest):
    """Changes to the settings of a key. `models` null allows all models."""

    name: str | None = None
    tier: str | None = None
    scopes: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    expires_at: Timestamp | None = None


class KeyCreate(KeyUpdate):
    """A new key. `user` is an e-mail address; a user who does not exist is created."""

    tenant: str
    user: str


class KeyRevoke(AdminRequest):
    """The options of a revocation. `now` also ends the key's running answers."""

    now: bool = False


class KeyRotate(AdminRequest):
    """The options of a rotation: the seconds for which the previous secret stays valid."""

    overlap_seconds: float = Field(default=86_400.0, ge=0, le=3650 * 86_400)


class KeyListQuery(AdminRequest):
    """The query of a list of keys. `all` includes keys that are revoked or expired."""

    tenant: str | None = None
    user: str | None = None
    all: bool = False


class KeyRead(AdminSchema):
    """A key without its secret.

    `prefix` has the first characters of the secret. `state` is `active`, or the reason why the key
    is rejected.
    """

    id: str
    prefix: str
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
    """A key with its secret `key`, which is returned only once."""

    key: str


class KeyDetails(KeyRead):
    """A key with the limits of its tenant.

    `spent_micros` is the amount spent of the key's budget in the current period.
    """

    spent_micros: int | None
    tenant_limits: LimitFields


class PriceCreate(AdminRequest):
    """A price in US dollars per million tokens.

    `cached` defaults to the value of `input`, and `from` to the current time.
    """

    model: str
    input: Dollars
    cached: Dollars | None = None
    output: Dollars
    valid_from: Timestamp | None = Field(default=None, alias="from")


class PriceListQuery(AdminRequest):
    """The query of a list of prices. `at` selects the prices in force at a time."""

    model: str | None = None
    at: Timestamp | None = None


class PriceRead(AdminSchema):
    """A price in US dollars per million tokens, valid until the next price of the model."""

    id: str
    model: str
    valid_from: Timestamp = Field(validation_alias="from", serialization_alias="from")
    input: Dollars
    cached: Dollars
    output: Dollars
    in_force: bool


class DateRange(AdminSchema):
    """A range of UTC days, both included."""

    first: date = Field(validation_alias="from", serialization_alias="from")
    last: date = Field(validation_alias="to", serialization_alias="to")

    @classmethod
    def resolve(cls, first: date | None, last: date | None, now: datetime) -> Self:
        """Return the first and last day, which default to the first of this month and today.

        Raises:
            InputError: The range ends before it begins.
        """
        today = now.astimezone(UTC).date()
        last = last or max(today, first or today)
        first = first or last.replace(day=1)
        if first > last:
            raise InputError(f"A period from {first} to {last} ends before it begins; swap the two days.")
        return cls(first=first, last=last)


class UsageReportQuery(AdminRequest):
    """The query of a usage report.

    `from` defaults to the first of this month, and `to` to today (UTC).
    """

    tenant: str | None = None
    user: str | None = None
    key: str | None = None
    model: str | None = None
    first: date | None = Field(default=None, alias="from")
    last: date | None = Field(default=None, alias="to")
    by: tuple[UsageGroup, ...] = ()


class UsageTotals(AdminSchema):
    """Sums of usage. `input_tokens` includes cached tokens."""

    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_micros: int
    cost_usd: float

    def data(self) -> dict[str, Any]:
        """Return the object as JSON data, with only the requested groups."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class UsageLine(UsageTotals):
    """Sums of usage in one group. Only the requested groups are set."""

    day: str | None = None
    tenant: str | None = None
    user: str | None = None
    model: str | None = None
    key: str | None = None


class _Period(AdminSchema):
    period: DateRange


class UsageReport(UsageTotals, _Period):
    """The usage in a period: the total, and a line for each group."""

    lines: tuple[UsageLine, ...]


class ReconciliationRequest(AdminSchema):
    """The output tokens that the engines have counted, by model (`served`)."""

    served: dict[str, int] = Field(default_factory=dict)


class MissingEvents(AdminSchema):
    """A range of a gateway's events, `first` to `last`, that is missing in the ledger.

    Later events of the gateway have arrived.
    """

    gateway: str
    first: int
    last: int


class EngineTokens(AdminSchema):
    """The output tokens of a model in its engines and in the ledger.

    The engines counted `served` tokens, and the ledger has `billed` tokens, both from the start of
    their records. `unbilled` tokens were served and not billed since the previous report; they
    include end-of-text tokens and the tokens of clients that disconnected. `unbilled` is null in
    the first report.
    """

    model: str
    served: int
    billed: int
    unbilled: int | None = None


class Reconciliation(AdminSchema):
    """A comparison of the ledger with gateways and engines.

    `missing` is the number of missing events. `gaps` lists at most 1,000 ranges of them.
    """

    at: Timestamp
    gateways: int
    missing: int
    gaps: tuple[MissingEvents, ...] = ()
    engines: tuple[EngineTokens, ...] = ()


class DeadLetterListQuery(AdminRequest):
    """The query of usage events that could not be billed: the newest `limit` events."""

    limit: int = Field(default=100, ge=1, le=10_000)


class DeadLetterRead(AdminSchema):
    """A usage event that could not be billed.

    `count` is the number of its arrivals, and `last_at` the time of the last. `signed` is true if a
    gateway wrote the event. `value` is the text of the event, escaped and truncated.
    """

    reason: str
    source: str
    signed: bool
    count: int
    last_at: Timestamp
    value: str


class AuditQuery(AdminRequest):
    """The query of the audit log: the newest `limit` entries.

    `action` is a prefix such as `key.` or `access.`. `changes_only` leaves out refusals and
    findings of safety filters.
    """

    tenant: str | None = None
    action: str | None = None
    since: Timestamp | None = None
    changes_only: bool = False
    limit: int = Field(default=100, ge=1, le=10_000)


class AuditEntryRead(AdminSchema):
    """An entry of the audit log.

    `actor` is `cli:` and an operating-system user, `key:` or `user:` and an id, or `address:` and a
    network address.
    """

    id: str
    created_at: Timestamp
    actor: str
    action: str
    subject: str
    tenant: str | None = Field(validation_alias=AliasChoices("tenant", "tenant_id"))
    detail: dict[str, Any]
