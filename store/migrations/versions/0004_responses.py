"""Stored responses of the Responses API, which every gateway of a deployment finds."""

import sqlalchemy as sa
from alembic import op

from llmops.store.columns import UtcDateTime

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("previous_id", sa.String(length=64), nullable=True),
        sa.Column("running", sa.Boolean(), nullable=False),
        sa.Column("cancelled", sa.Boolean(), nullable=False),
        sa.Column("written_at", UtcDateTime(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.Column("items", sa.Text(), nullable=False),
        sa.Column("cuts", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_responses")),
    )
    op.create_index("idx_responses_owner", "responses", ["owner", "written_at"])
    op.create_table(
        "response_items",
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("response_id", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["response_id"], ["responses.id"], name=op.f("fk_response_items_response_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("owner", "id", name=op.f("pk_response_items")),
    )
    op.create_index(op.f("idx_response_items_response_id"), "response_items", ["response_id"])
