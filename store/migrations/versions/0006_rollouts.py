"""Versions of models, roll-outs from one version to another, and pins of keys to versions."""

import sqlalchemy as sa
from alembic import op

from llmops.store.columns import UtcDateTime

revision = "0006"
down_revision = "0005"

UUID = sa.Uuid(as_uuid=False).with_variant(sa.String(36), "sqlite")


def upgrade() -> None:
    op.create_table(
        "model_versions",
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("replicas", sa.JSON(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("created_at", UtcDateTime(), server_default=sa.func.current_timestamp(), nullable=False),
        sa.PrimaryKeyConstraint("model", "name", name=op.f("pk_model_versions")),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", UUID, nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("open_model", sa.String(length=255), nullable=True),
        sa.Column("stable", sa.String(length=64), nullable=False),
        sa.Column("candidate", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("percent", sa.Float(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("verdict", sa.JSON(none_as_null=True)),
        sa.Column("started_at", UtcDateTime(), nullable=False),
        sa.Column("changed_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint("open_model", name=op.f("uq_rollouts_open_model")),
    )
    op.create_index("idx_rollouts_model", "rollouts", ["model", "started_at"])
    op.create_table(
        "version_pins",
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("key_id", sa.String(length=20), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("model", "key_id", name=op.f("pk_version_pins")),
    )
    op.create_table(
        "rollout_outcomes",
        sa.Column("id", UUID, nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("written_at", UtcDateTime(), nullable=False),
        sa.Column("outcomes", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollout_outcomes")),
    )
    op.create_index("idx_rollout_outcomes_model", "rollout_outcomes", ["model", "written_at"])
