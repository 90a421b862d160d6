"""Usage of each tenant, per day and model."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost_micros")


def upgrade() -> None:
    op.create_table(
        "tenant_totals",
        sa.Column("tenant_id", sa.String(length=63), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        *[sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS],
        sa.PrimaryKeyConstraint("tenant_id", "day", "model", name=op.f("pk_tenant_totals")),
    )
    op.create_index("idx_tenant_totals_day", "tenant_totals", ["day"])
    op.execute(
        f"INSERT INTO tenant_totals (tenant_id, day, model, {', '.join(SUMS)}) "
        f"SELECT coalesce(users.tenant_id, ''), day, model, {', '.join(f'sum({name})' for name in SUMS)} "
        "FROM usage_totals LEFT JOIN users ON users.id = usage_totals.user_id "
        "GROUP BY coalesce(users.tenant_id, ''), day, model"
    )
