"""The tables of the newest schema. `migrations/` creates them, and a test compares the two.

Money is in whole micro-dollars, times are in UTC. `usage_records` and the tables of totals have no
foreign keys: billing must never fail because a user or key is missing.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    Uuid,
    func,
    text,
)

from llmops.store.columns import ClientString, ClientText, UtcDateTime

# SQLite has no type for UUIDs, so they are stored as text, in the form that bills show.
UUID = Uuid(as_uuid=False).with_variant(String(36), "sqlite")

SCHEMA = "0007"
"""Number of the newest revision under `migrations/versions`."""
SCHEMA_TABLE = "llmops_schema"
#: Names of the summed columns, which the tables of totals have and reports show.
SUMMED = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost_micros")

# a later migration can change a constraint only by its name
metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "idx_%(table_name)s_%(column_0_name)s",
    }
)


def _id() -> Column[str]:
    return Column("id", UUID, primary_key=True)


def _created_at() -> Column:
    return Column("created_at", UtcDateTime, nullable=False, server_default=func.current_timestamp())


def _sums() -> tuple[Column, ...]:
    return tuple(Column(name, BigInteger, nullable=False) for name in SUMMED)


def _limits() -> tuple[Column, ...]:
    return (
        Column("rpm", Integer),
        Column("tpm", Integer),
        Column("concurrent", Integer),
        Column("budget_micros", BigInteger),
        Column("budget_period", String(10)),
    )


tenants = Table(
    "tenants",
    metadata,
    Column("id", String(63), primary_key=True),
    *_limits(),
    _created_at(),
    Column("deleted_at", UtcDateTime),
)

users = Table(
    "users",
    metadata,
    _id(),
    Column("email", String(255), nullable=False, unique=True),
    Column("tier", String(20), nullable=False, server_default="free"),
    # hash of the user's newest key, for programs that read only this table; access is decided by
    # api_keys
    Column("api_key_hash", String(64)),
    _created_at(),
    Column("tenant_id", String(63), ForeignKey("tenants.id"), nullable=False, index=True),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("id", String(20), nullable=False, unique=True),
    Column("prefix", String(12), nullable=False),
    Column("previous_hash", String(64), unique=True),
    Column("previous_until", UtcDateTime),
    Column("user_id", UUID, ForeignKey("users.id"), nullable=False, index=True),
    Column("name", String(100)),
    Column("tier", String(20), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("models", JSON(none_as_null=True)),
    *_limits(),
    _created_at(),
    Column("expires_at", UtcDateTime),
    Column("revoked_at", UtcDateTime),
)

prices = Table(
    "prices",
    metadata,
    Column("model", String(255), primary_key=True),
    Column("valid_from", UtcDateTime, primary_key=True),
    Column("input_micros", BigInteger, nullable=False),
    Column("cached_micros", BigInteger, nullable=False),
    Column("output_micros", BigInteger, nullable=False),
)

conversations = Table(
    "conversations",
    metadata,
    _id(),
    # Caller.owner as a UUID; a gateway without accounts has owners that are not in `users`
    Column("user_id", UUID, nullable=False),
    # '' without accounts; a copy of the user's tenant, so that purges need no join
    Column("tenant_id", String(63), nullable=False, index=True),
    Column("title", ClientString(500)),
    Column("model", ClientString(50), nullable=False),
    Column("system_prompt", ClientText),
    # JSON as the client sent it
    Column("metadata", Text, nullable=False),
    # the last message of the shown branch
    Column("head_id", UUID),
    # number of characters of all messages and the system prompt
    Column("size", BigInteger, nullable=False),
    _created_at(),
    Column("updated_at", UtcDateTime, nullable=False, server_default=func.current_timestamp()),
    Column("deleted_at", UtcDateTime, index=True),
)
Index("idx_conversations_user", conversations.c.user_id, conversations.c.updated_at.desc())

messages = Table(
    "messages",
    metadata,
    _id(),
    Column("conversation_id", UUID, ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
    # None for a first message; messages with the same parent are branches
    Column("parent_id", UUID),
    # number of the message in the order of writing, within its conversation
    Column("position", Integer, nullable=False),
    # id of the message in the API
    Column("item_id", String(128), nullable=False),
    Column("role", String(20), nullable=False),
    Column("content", ClientText, nullable=False),
    # JSON of the items of the Responses API that this row represents, None for a plain message
    Column("items", Text),
    Column("status", String(20), nullable=False),
    Column("token_count", Integer),
    Column("prompt_tokens", Integer),
    Column("cost_micros", BigInteger),
    Column("model", ClientString(50)),
    Column("finish_reason", String(20)),
    Column("latency_ms", Integer),
    _created_at(),
    Column("written_at", UtcDateTime, nullable=False),
)
Index("idx_messages_conversation", messages.c.conversation_id, messages.c.created_at)
Index("idx_messages_position", messages.c.conversation_id, messages.c.position, unique=True)

responses = Table(
    "responses",
    metadata,
    Column("id", ClientString(64), primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("previous_id", ClientString(64)),
    Column("running", Boolean, nullable=False),
    Column("cancelled", Boolean, nullable=False),
    Column("written_at", UtcDateTime, nullable=False),
    Column("size", Integer, nullable=False),
    Column("response", Text, nullable=False),
    Column("items", Text, nullable=False),
    Column("cuts", Text, nullable=False),
)
Index("idx_responses_owner", responses.c.owner, responses.c.written_at)

response_items = Table(
    "response_items",
    metadata,
    Column("owner", String(255), primary_key=True),
    Column("id", String(128), primary_key=True),
    Column("response_id", String(64), ForeignKey("responses.id", ondelete="CASCADE"), nullable=False, index=True),
)

# times at which all data of an owner was purged; responses that began earlier are not stored
purges = Table(
    "purges",
    metadata,
    Column("owner", String(255), primary_key=True),
    Column("purged_at", UtcDateTime, primary_key=True),
)

usage_records = Table(
    "usage_records",
    metadata,
    _id(),
    Column("user_id", UUID, nullable=False),
    Column("model", String(255), nullable=False),
    Column("input_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False, server_default="0"),
    Column("cost_micros", BigInteger, nullable=False),
    Column("request_id", String(64), nullable=False),
    _created_at(),
    Column("key_id", String(20)),
    Column("gateway_id", String(64), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("reasoning_tokens", Integer, nullable=False, server_default="0"),
    Column("price_id", String(300)),
    Column("version", String(64)),
    Column("replica", String(255)),
    Column("status", SmallInteger, nullable=False),
    Column("finish_reason", String(20)),
    Column("ttft_ms", Integer),
    Column("latency_ms", Integer),
    Column("priority", String(20)),
    Column("migrations", SmallInteger, nullable=False, server_default="0"),
)
Index("idx_usage_user_period", usage_records.c.user_id, usage_records.c.created_at)
Index(
    "idx_usage_billing",
    usage_records.c.user_id,
    usage_records.c.model,
    usage_records.c.created_at,
    postgresql_where=text("cost_micros > 0"),
    sqlite_where=text("cost_micros > 0"),
)
Index("idx_usage_gateway_seq", usage_records.c.gateway_id, usage_records.c.seq)

usage_totals = Table(
    "usage_totals",
    metadata,
    Column("user_id", UUID, primary_key=True),
    # day precedes model in the key, so that a user's month is one range
    Column("day", Date, primary_key=True),
    Column("model", String(255), primary_key=True),
    # '' for usage without a key; the budgets of keys are computed from this table
    Column("key_id", String(20), primary_key=True),
    *_sums(),
)
Index("idx_usage_totals_day", usage_totals.c.day)
Index("idx_usage_totals_key", usage_totals.c.key_id, usage_totals.c.day)

# totals for tenants' budgets: a month of a tenant with thousands of users is a few dozen rows
tenant_totals = Table(
    "tenant_totals",
    metadata,
    # '' for users that the store did not know when the usage arrived
    Column("tenant_id", String(63), primary_key=True),
    Column("day", Date, primary_key=True),
    Column("model", String(255), primary_key=True),
    *_sums(),
)
Index("idx_tenant_totals_day", tenant_totals.c.day)

gateways = Table(
    "gateways",
    metadata,
    Column("id", String(64), primary_key=True),
    # high-water mark: all events of this gateway with smaller numbers are in usage_records
    Column("next_seq", BigInteger, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    _id(),
    _created_at(),
    Column("actor", String(255), nullable=False),
    Column("action", String(50), nullable=False),
    Column("subject", String(255), nullable=False),
    Column("tenant_id", String(63)),
    Column("detail", JSON, nullable=False),
)
Index("idx_audit_tenant", audit.c.tenant_id, audit.c.created_at)
Index("idx_audit_period", audit.c.created_at)

# usage events that could not be billed: a row for each value, or for each reason once the table is
# full
dead_letters = Table(
    "dead_letters",
    metadata,
    # SHA-256 of the reason and the value
    Column("id", String(64), primary_key=True),
    Column("reason", String(40), nullable=False),
    # id of the event if a gateway signed it
    Column("event_id", UUID, index=True),
    # topic, partition and offset of the event, or the gateway
    Column("source", String(255), nullable=False),
    Column("value", LargeBinary, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("first_at", UtcDateTime, nullable=False),
    Column("last_at", UtcDateTime, nullable=False, index=True),
)

# offsets at which the ledger began to read and from which it has not advanced, with the number of
# processes that crashed there
ledger_reads = Table(
    "ledger_reads",
    metadata,
    Column("topic", String(255), primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("offset", BigInteger, nullable=False),
    Column("deaths", Integer, nullable=False),
)

# Subjects of identity providers and their users. Another subject with the same address is another
# person.
identities = Table(
    "identities",
    metadata,
    Column("issuer", String(255), primary_key=True),
    Column("subject", String(255), primary_key=True),
    Column("user_id", UUID, ForeignKey("users.id"), nullable=False, index=True),
    _created_at(),
)

model_versions = Table(
    "model_versions",
    metadata,
    Column("model", String(255), primary_key=True),
    Column("name", String(64), primary_key=True),
    # the engine folder on the machine that starts the replicas, '' if they are started elsewhere
    Column("engine", Text, nullable=False),
    # addresses as in the setting `replicas`; empty for the gateways' own setting
    Column("replicas", JSON, nullable=False),
    # percentage of the requests; the weights of a model's versions add up to 100
    Column("weight", Float, nullable=False),
    Column("state", String(20), nullable=False),
    _created_at(),
)

rollouts = Table(
    "rollouts",
    metadata,
    _id(),
    Column("model", String(255), nullable=False),
    # the model until the roll-out ends, then NULL; unique, so that a model has at most one open
    # roll-out
    Column("open_model", String(255), unique=True),
    Column("stable", String(64), nullable=False),
    Column("candidate", String(64), nullable=False),
    Column("state", String(20), nullable=False),
    Column("percent", Float, nullable=False),
    # number of transitions, so that only one of two simultaneous writers succeeds
    Column("revision", Integer, nullable=False),
    Column("settings", JSON, nullable=False),
    Column("reason", Text, nullable=False),
    # latest verdict of the judge
    Column("verdict", JSON(none_as_null=True)),
    Column("started_at", UtcDateTime, nullable=False),
    Column("changed_at", UtcDateTime, nullable=False),
)
Index("idx_rollouts_model", rollouts.c.model, rollouts.c.started_at)

# keys whose requests go to a fixed version, whatever the weights
version_pins = Table(
    "version_pins",
    metadata,
    Column("model", String(255), primary_key=True),
    Column("key_id", String(20), primary_key=True),
    Column("version", String(64), nullable=False),
)

# batches of requests that finished during a roll-out, deleted when the roll-out ends
rollout_outcomes = Table(
    "rollout_outcomes",
    metadata,
    _id(),
    Column("model", String(255), nullable=False),
    Column("written_at", UtcDateTime, nullable=False),
    Column("outcomes", JSON, nullable=False),
)
Index("idx_rollout_outcomes_model", rollout_outcomes.c.model, rollout_outcomes.c.written_at)
