"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

UUID = sa.Uuid(as_uuid=False).with_variant(sa.String(36), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", UUID, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("actor", sa.String(length=255), nullable=False),
        sa.Column("action", sa.String(length=50), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=63)),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index("idx_audit_period", "audit", ["created_at"])
    op.create_index("idx_audit_tenant", "audit", ["tenant_id", "created_at"])
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateways")),
    )
    op.create_table(
        "prices",
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("valid_from", sa.DateTime(timezone=True), nullable=False),
        sa.Column("input_micros", sa.BigInteger(), nullable=False),
        sa.Column("cached_micros", sa.BigInteger(), nullable=False),
        sa.Column("output_micros", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model", "valid_from", name=op.f("pk_prices")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("rpm", sa.Integer()),
        sa.Column("tpm", sa.Integer()),
        sa.Column("concurrent", sa.Integer()),
        sa.Column("budget_micros", sa.BigInteger()),
        sa.Column("budget_period", sa.String(length=10)),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
    )
    op.create_table(
        "usage_records",
        sa.Column("id", UUID, nullable=False),
        sa.Column("user_id", UUID, nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("input_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cost_micros", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("key_id", sa.String(length=20)),
        sa.Column("gateway_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("reasoning_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("price_id", sa.String(length=300)),
        sa.Column("version", sa.String(length=64)),
        sa.Column("replica", sa.String(length=255)),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("finish_reason", sa.String(length=20)),
        sa.Column("ttft_ms", sa.Integer()),
        sa.Column("latency_ms", sa.Integer()),
        sa.Column("priority", sa.String(length=20)),
        sa.Column("migrations", sa.SmallInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_records")),
    )
    op.create_index(
        "idx_usage_billing",
        "usage_records",
        ["user_id", "model", "created_at"],
        postgresql_where=sa.text("cost_micros > 0"),
        sqlite_where=sa.text("cost_micros > 0"),
    )
    op.create_index("idx_usage_gateway_seq", "usage_records", ["gateway_id", "seq"])
    op.create_index("idx_usage_user_period", "usage_records", ["user_id", "created_at"])
    op.create_table(
        "usage_totals",
        sa.Column("user_id", UUID, nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("key_id", sa.String(length=20), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_micros", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "day", "model", "key_id", name=op.f("pk_usage_totals")),
    )
    op.create_index("idx_usage_totals_day", "usage_totals", ["day"])
    op.create_index("idx_usage_totals_key", "usage_totals", ["key_id", "day"])
    op.create_table(
        "users",
        sa.Column("id", UUID, nullable=False),
        sa.Column("email", sa.String(length=255), nullable=False),
        sa.Column("tier", sa.String(length=20), server_default="free", nullable=False),
        sa.Column("api_key_hash", sa.String(length=64)),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("tenant_id", sa.String(length=63), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_users_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
    )
    op.create_index(op.f("idx_users_tenant_id"), "users", ["tenant_id"])
    op.create_table(
        "api_keys",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("prefix", sa.String(length=12), nullable=False),
        sa.Column("previous_hash", sa.String(length=64)),
        sa.Column("previous_until", sa.DateTime(timezone=True)),
        sa.Column("user_id", UUID, nullable=False),
        sa.Column("name", sa.String(length=100)),
        sa.Column("tier", sa.String(length=20), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("models", sa.JSON(none_as_null=True)),
        sa.Column("rpm", sa.Integer()),
        sa.Column("tpm", sa.Integer()),
        sa.Column("concurrent", sa.Integer()),
        sa.Column("budget_micros", sa.BigInteger()),
        sa.Column("budget_period", sa.String(length=10)),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_api_keys_user_id")),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("id", name=op.f("uq_api_keys_id")),
        sa.UniqueConstraint("previous_hash", name=op.f("uq_api_keys_previous_hash")),
    )
    op.create_index(op.f("idx_api_keys_user_id"), "api_keys", ["user_id"])
    op.create_table(
        "conversations",
        sa.Column("id", UUID, nullable=False),
        sa.Column("user_id", UUID, nullable=False),
        sa.Column("title", sa.String(length=500)),
        sa.Column("model", sa.String(length=50), nullable=False),
        sa.Column("system_prompt", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_conversations_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_conversations")),
    )
    op.create_index(op.f("idx_conversations_deleted_at"), "conversations", ["deleted_at"])
    op.create_index("idx_conversations_user", "conversations", ["user_id", sa.literal_column("updated_at DESC")])
    op.create_table(
        "messages",
        sa.Column("id", UUID, nullable=False),
        sa.Column("conversation_id", UUID, nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("token_count", sa.Integer()),
        sa.Column("model", sa.String(length=50)),
        sa.Column("finish_reason", sa.String(length=20)),
        sa.Column("latency_ms", sa.Integer()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.ForeignKeyConstraint(
            ["conversation_id"], ["conversations.id"], name=op.f("fk_messages_conversation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_messages")),
    )
    op.create_index("idx_messages_conversation", "messages", ["conversation_id", "created_at"])
