"""Dead letters, read positions of the ledger, and identities of users.

Dead letters are events that are on no bill, read positions say where the ledger stopped reading,
and identities are the subjects that users are bound to.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

UUID = sa.Uuid(as_uuid=False).with_variant(sa.String(36), "sqlite")


def upgrade() -> None:
    op.create_table(
        "dead_letters",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=False),
        sa.Column("event_id", UUID),
        sa.Column("source", sa.String(length=255), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("first_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letters")),
    )
    op.create_index(op.f("idx_dead_letters_event_id"), "dead_letters", ["event_id"])
    op.create_index(op.f("idx_dead_letters_last_at"), "dead_letters", ["last_at"])
    op.create_table(
        "ledger_reads",
        sa.Column("topic", sa.String(length=255), nullable=False),
        sa.Column("partition", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition", name=op.f("pk_ledger_reads")),
    )
    op.create_table(
        "identities",
        sa.Column("issuer", sa.String(length=255), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("user_id", UUID, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_identities_user_id")),
        sa.PrimaryKeyConstraint("issuer", "subject", name=op.f("pk_identities")),
    )
    op.create_index(op.f("idx_identities_user_id"), "identities", ["user_id"])
