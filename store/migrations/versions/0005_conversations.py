"""Conversations of callers with and without accounts, whose messages form branches.

The tables of the first schema are replaced: no release ever wrote to them.
"""

import sqlalchemy as sa
from alembic import op

from llmops.store.columns import UtcDateTime

revision = "0005"
down_revision = "0004"

UUID = sa.Uuid(as_uuid=False).with_variant(sa.String(36), "sqlite")


def upgrade() -> None:
    op.drop_table("messages")
    op.drop_table("conversations")
    op.create_table(
        "conversations",
        sa.Column("id", UUID, nullable=False),
        sa.Column("user_id", UUID, nullable=False),
        sa.Column("tenant_id", sa.String(length=63), nullable=False),
        sa.Column("title", sa.String(length=500)),
        sa.Column("model", sa.String(length=50), nullable=False),
        sa.Column("system_prompt", sa.Text()),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("head_id", UUID),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("deleted_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_conversations")),
    )
    op.create_index("idx_conversations_user", "conversations", ["user_id", sa.text("updated_at DESC")])
    op.create_index(op.f("idx_conversations_tenant_id"), "conversations", ["tenant_id"])
    op.create_index(op.f("idx_conversations_deleted_at"), "conversations", ["deleted_at"])
    op.create_table(
        "messages",
        sa.Column("id", UUID, nullable=False),
        sa.Column("conversation_id", UUID, nullable=False),
        sa.Column("parent_id", UUID),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("items", sa.Text()),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("token_count", sa.Integer()),
        sa.Column("prompt_tokens", sa.Integer()),
        sa.Column("cost_micros", sa.BigInteger()),
        sa.Column("model", sa.String(length=50)),
        sa.Column("finish_reason", sa.String(length=20)),
        sa.Column("latency_ms", sa.Integer()),
        sa.Column("created_at", UtcDateTime(), server_default=sa.func.current_timestamp(), nullable=False),
        sa.Column("written_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["conversation_id"], ["conversations.id"], name=op.f("fk_messages_conversation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_messages")),
    )
    op.create_index("idx_messages_conversation", "messages", ["conversation_id", "created_at"])
    op.create_index("idx_messages_position", "messages", ["conversation_id", "position"], unique=True)
