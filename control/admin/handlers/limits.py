"""Limits as the wire has them, and as the store does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmops.control.admin import schemas
from llmops.store.accounts.limits import Budget, Limits


def merge_limits(was: Limits, asked: schemas.LimitFields) -> Limits:
    """With those that were given. Raises InputError for one that cannot be."""
    given = {name: getattr(asked, name) for name in schemas.LimitFields.model_fields if name in asked.model_fields_set}
    if given.get("budget") is not None:
        given["budget"] = Budget(given["budget"].micros, given["budget"].period)
    return replace(was, **given)


def limit_fields(limits: Limits) -> dict[str, Any]:
    budget = limits.budget and schemas.BudgetFields(micros=limits.budget.micros, period=limits.budget.period)  # type: ignore[arg-type]
    return {"rpm": limits.rpm, "tpm": limits.tpm, "concurrent": limits.concurrent, "budget": budget}
