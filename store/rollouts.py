"""Versions of models, and the roll-outs between versions.

Every change of a roll-out is one transaction of its state, the weights of both versions and an
entry in the audit log. A process that is killed leaves either all changes or none.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import RowMapping, delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import InputError, ResourceError, UnknownResourceError
from llmops.store.audit import AuditContext, record_action
from llmops.store.columns import insert
from llmops.store.damaged_rows import read_undamaged
from llmops.store.tables import model_versions, rollout_outcomes, rollouts, version_pins

log = logging.getLogger(__name__)

#: State of a version that receives requests in proportion to its weight.
ACTIVE = "active"
#: State of a version that receives no requests. Its replicas are not used, even if a gateway's
#: settings name them.
RETIRED = "retired"
#: Name of a model's version before its first roll-out, served by the replicas in the settings.
INITIAL_VERSION = "initial"
MAX_NAME_LENGTH = 64
#: Suffix of the name of a baseline twin, which is a fresh copy of the stable version.
TWIN_SUFFIX = "-twin"
#: Maximum number of batches of outcomes that one query reads, which bounds the memory.
OUTCOME_BATCHES = 500


@dataclass(frozen=True)
class ModelVersion:
    """A version of a model.

    Attributes:
        model: Name of the model.
        name: Name of the version.
        engine: The engine folder on the machine that starts the replicas; empty if they are started
            elsewhere.
        replicas: Addresses as in the setting `replicas`. Empty for the addresses of the gateways'
            settings.
        weight: Percent of the requests.
        state: ACTIVE or RETIRED.
        created_at: Time of the creation.
    """

    model: str
    name: str
    engine: str = ""
    replicas: Sequence[str] = ()
    weight: float = 0.0
    state: str = ACTIVE
    created_at: datetime | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME_LENGTH or not self.name.isprintable() or not self.name.isascii():
            raise InputError(
                f"{self.name[:80]!r} cannot name a version: write 1 to {MAX_NAME_LENGTH} printable ASCII characters."
            )
        # SQLite keeps a text in a column of numbers, and PostgreSQL NaN
        if not isinstance(self.weight, int | float) or not 0 <= self.weight <= 100:
            raise InputError(f"The version {self.name} has no weight from 0 to 100; write one into the store.")


@dataclass(frozen=True)
class Rollout:
    """A roll-out of a model from its stable version to a candidate.

    Attributes:
        id: Id of the roll-out.
        model: Name of the model.
        stable: Name of the stable version.
        candidate: Name of the candidate.
        state: State of the roll-out.
        started_at: Time of the creation.
        changed_at: Time of the last transition.
        open_model: The model while the roll-out is open, then None. The column is unique, so that a
            model has at most one open roll-out.
        percent: Percentage of requests that the candidate gets; the stable version gets the others.
        revision: Number of transitions so far.
        settings: Options of the roll-out, as JSON.
        reason: Reason for the state, as text.
        verdict: Latest verdict of the judge, as JSON.
    """

    id: str
    model: str
    stable: str
    candidate: str
    state: str
    started_at: datetime
    changed_at: datetime
    open_model: str | None
    percent: float = 0.0
    revision: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    verdict: Mapping[str, Any] | None = None

    @property
    def is_open(self) -> bool:
        """Return True until the roll-out has ended and all its work is done."""
        return self.open_model is not None

    @property
    def twin(self) -> str:
        """Return the name of the baseline twin.

        The twin is a copy of the stable version whose cache is as cold as the candidate's.
        """
        return f"{self.stable[: MAX_NAME_LENGTH - len(TWIN_SUFFIX)]}{TWIN_SUFFIX}"

    def weights(self, has_twin: bool) -> Mapping[str, float]:
        """Return the percentage of requests for each version.

        A twin gets as many requests as the candidate, but at most half of the remaining requests.
        """
        if not has_twin:
            return {self.stable: 100.0 - self.percent, self.candidate: self.percent}
        twin = min(self.percent, (100.0 - self.percent) / 2)
        return {self.stable: 100.0 - self.percent - twin, self.twin: twin, self.candidate: self.percent}


class OutcomeBatch(NamedTuple):
    """The outcomes of requests that a gateway wrote at once."""

    id: str
    written_at: datetime
    outcomes: Sequence[Mapping[str, Any]]


async def list_versions(connection: AsyncConnection, model: str | None = None) -> Sequence[ModelVersion]:
    """Return the versions of one or all models, the oldest first.

    A version with a damaged value is left out and logged.
    """
    columns = model_versions.c
    statement = select(model_versions).order_by(columns.created_at, columns.name)
    if model is not None:
        statement = statement.where(columns.model == model)
    label = columns.name + " of " + columns.model
    return await read_undamaged(connection, statement, _version, "version", label)


def _version(row: RowMapping) -> ModelVersion:
    if not isinstance(row["replicas"], list) or not all(isinstance(one, str) for one in row["replicas"]):
        raise TypeError("replicas")
    return ModelVersion(**row)


async def list_all_versions(
    connection: AsyncConnection, model: str | None = None
) -> tuple[Sequence[ModelVersion], Collection[str]]:
    """Return the versions of one or all models, the oldest first, and the models of damaged versions."""
    names = select(model_versions.c.model, model_versions.c.name)
    if model is not None:
        names = names.where(model_versions.c.model == model)
    stored, found = (await connection.execute(names)).all(), await list_versions(connection, model)
    intact = {(one.model, one.name) for one in found}
    return found, {model for model, name in stored if (model, name) not in intact}


async def require_versions(connection: AsyncConnection, model: str) -> Sequence[ModelVersion]:
    """Return the versions of a model, the oldest first. Raises InputError if one is damaged."""
    found, damaged = await list_all_versions(connection, model)
    if damaged:
        raise InputError(f"A version of {model} has a damaged value; correct its row in the store.")
    return found


async def put_version(connection: AsyncConnection, version: ModelVersion, at: datetime) -> None:
    """Insert a version, or update the engine, replicas and state of a stored version.

    The weight of a stored version is not updated.
    """
    values = {"engine": version.engine, "replicas": list(version.replicas), "state": version.state}
    statement = insert(connection, model_versions).values(
        model=version.model, name=version.name, weight=version.weight, created_at=version.created_at or at, **values
    )
    await connection.execute(statement.on_conflict_do_update(index_elements=["model", "name"], set_=values))


async def set_replicas(connection: AsyncConnection, model: str, name: str, replicas: Sequence[str]) -> None:
    """Set the addresses of a version's replicas."""
    statement = update(model_versions).where(model_versions.c.model == model, model_versions.c.name == name)
    await connection.execute(statement.values(replicas=list(replicas)))


async def list_rollouts(connection: AsyncConnection, model: str | None = None, limit: int = 100) -> Sequence[Rollout]:
    """Return roll-outs, the newest first."""
    statement = select(rollouts).order_by(rollouts.c.started_at.desc(), rollouts.c.id)
    if model is not None:
        statement = statement.where(rollouts.c.model == model)
    return await read_undamaged(connection, statement, _rollout, "roll-out", rollouts.c.id, limit)


async def open_rollouts(connection: AsyncConnection) -> Sequence[Rollout]:
    """Return the open roll-outs. A roll-out with a damaged value is left out and logged."""
    statement = (
        select(rollouts).where(rollouts.c.open_model.is_not(None)).order_by(rollouts.c.started_at, rollouts.c.id)
    )
    return await read_undamaged(connection, statement, _rollout, "roll-out", rollouts.c.id)


def _rollout(row: RowMapping) -> Rollout:
    is_object = isinstance(row["settings"], dict) and isinstance(row["verdict"], dict | None)
    if not is_object or not 0 <= row["percent"] <= 100:
        raise TypeError("settings, verdict or percent")
    return Rollout(**row)


async def find_latest_rollout(connection: AsyncConnection, model: str, only_open: bool = False) -> Rollout | None:
    """Return the latest roll-out of a model, or None. Raises InputError if its row is damaged.

    A damaged roll-out is not left out here, because an earlier one may have ended otherwise.
    """
    column = rollouts.c.open_model if only_open else rollouts.c.model
    order = (rollouts.c.started_at.desc(), rollouts.c.id)
    latest = await connection.scalar(select(rollouts.c.id).where(column == model).order_by(*order).limit(1))
    if latest is None:
        return None
    statement = select(rollouts).where(rollouts.c.id == latest)
    found = await read_undamaged(connection, statement, _rollout, "roll-out", rollouts.c.id)
    if not found:
        raise InputError(f"The roll-out of {model} has a damaged value; correct its row in the store.")
    return found[0]


async def require_open_rollout(connection: AsyncConnection, model: str) -> Rollout:
    """Return the open roll-out of a model.

    Raises:
        UnknownResourceError: The model has no open roll-out.
        InputError: A value of the roll-out's row is damaged.
    """
    found = await find_latest_rollout(connection, model, only_open=True)
    if found is None:
        raise UnknownResourceError(
            f"The model {model} has no roll-out in progress; `llmops rollout history {model}` lists the earlier ones."
        )
    return found


async def create_rollout(
    connection: AsyncConnection, candidate: ModelVersion, state: str, settings: Mapping[str, Any], by: AuditContext
) -> Rollout:
    """Insert a roll-out from the serving version to a candidate, and return the roll-out.

    A model without versions gets its initial version first.

    Raises:
        InputError: The model has an open roll-out, or the candidate already serves.
    """
    known = await require_versions(connection, candidate.model)
    stable = max(known, key=lambda version: version.weight, default=None)
    if stable is None:
        stable = ModelVersion(candidate.model, INITIAL_VERSION, weight=100.0)
        await put_version(connection, stable, by.at)
    if any(version.name == candidate.name and version.weight for version in known):
        raise InputError(
            f"{candidate.model} is served by the version {candidate.name} already; give another --to, or another "
            "--name."
        )
    # the candidate is created after the version that it replaces, so that lists show this order
    await put_version(connection, candidate, by.at + timedelta(microseconds=1))
    rollout = Rollout(
        id=str(uuid4()),
        model=candidate.model,
        stable=stable.name,
        candidate=candidate.name,
        state=state,
        started_at=by.at,
        changed_at=by.at,
        open_model=candidate.model,
        settings=settings,
    )
    try:
        async with connection.begin_nested():
            await connection.execute(rollouts.insert().values(vars(rollout)))
    except IntegrityError as error:
        raise InputError(
            f"A roll-out of {rollout.model} is in progress. Finish it first: `llmops rollout promote {rollout.model} "
            f"--full`, or `llmops rollout rollback {rollout.model}`."
        ) from error
    await _record(connection, rollout, by, "start")
    return rollout


async def save_rollout(connection: AsyncConnection, rollout: Rollout, by: AuditContext) -> None:
    """Write a roll-out's next state, and the weights that follow from it.

    Raises:
        ResourceError: Another process has changed the roll-out meanwhile.
    """
    current = (rollouts.c.id == rollout.id) & (rollouts.c.revision == rollout.revision - 1)
    changed = await connection.execute(update(rollouts).where(current).values(vars(rollout)))
    if changed.rowcount != 1:
        raise ResourceError(f"The roll-out of {rollout.model} has changed meanwhile; check its state and try again.")
    for name, weight in rollout.weights(await has_twin(connection, rollout)).items():
        state = ACTIVE if weight or rollout.is_open else RETIRED
        this = (model_versions.c.model == rollout.model) & (model_versions.c.name == name)
        await connection.execute(update(model_versions).where(this).values(weight=weight, state=state))
    if not rollout.is_open:
        await connection.execute(delete(rollout_outcomes).where(rollout_outcomes.c.model == rollout.model))
    await _record(connection, rollout, by, rollout.state)


async def has_twin(connection: AsyncConnection, rollout: Rollout) -> bool:
    """Return True if the baseline twin of a roll-out has been started."""
    columns = model_versions.c
    statement = select(columns.state).where(columns.model == rollout.model, columns.name == rollout.twin)
    return (await connection.execute(statement)).scalar() == ACTIVE


async def save_verdict(connection: AsyncConnection, rollout: Rollout, verdict: Mapping[str, Any]) -> None:
    """Write the latest verdict, unless the roll-out has changed since the judge read it."""
    current = (rollouts.c.id == rollout.id) & (rollouts.c.revision == rollout.revision)
    await connection.execute(update(rollouts).where(current).values(verdict=dict(verdict)))


async def list_pins(connection: AsyncConnection) -> Mapping[tuple[str, str], str]:
    """Return the pinned version for each (model, key id). Damaged pins are left out and logged."""
    statement = select(version_pins).order_by(version_pins.c.model, version_pins.c.key_id)
    return dict(await read_undamaged(connection, statement, _pin, "pin of the key", version_pins.c.key_id))


def _pin(row: RowMapping) -> tuple[tuple[str, str], str]:
    return (row["model"], row["key_id"]), row["version"]


async def pin_key(connection: AsyncConnection, model: str, key_id: str, version: str | None, by: AuditContext) -> None:
    """Pin a key to a version of a model, or remove the pin if `version` is None.

    Raises:
        UnknownResourceError: The model has no such version.
    """
    await connection.execute(delete(version_pins).where(version_pins.c.model == model, version_pins.c.key_id == key_id))
    if version is not None:
        names = [one.name for one in await list_versions(connection, model)]
        if version not in names:
            known = f"its versions are {', '.join(names)}" if names else "it has had no roll-out yet"
            raise UnknownResourceError(f"{model} has no version {version}; {known}.")
        await connection.execute(version_pins.insert().values(model=model, key_id=key_id, version=version))
    await record_action(connection, by, "rollout.pin", model, detail={"key": key_id, "version": version})


async def add_outcomes(connection: AsyncConnection, model: str, outcomes: Sequence[Any], at: datetime) -> None:
    """Insert a batch of outcomes of finished requests."""
    await connection.execute(
        rollout_outcomes.insert().values(id=str(uuid4()), model=model, written_at=at, outcomes=list(outcomes))
    )


async def read_outcomes(
    connection: AsyncConnection, model: str, since: datetime, until: datetime | None = None
) -> Sequence[OutcomeBatch]:
    """Return up to OUTCOME_BATCHES batches of outcomes, the oldest first.

    A batch with a damaged value is left out and logged.

    Args:
        connection: A connection to the store.
        model: The model of the roll-out.
        since: Only batches written at this time or later.
        until: Only batches written before this time.
    """
    columns = rollout_outcomes.c
    statement = (
        select(columns.id, columns.written_at, columns.outcomes)
        .where(columns.model == model, columns.written_at >= since)
        .order_by(columns.written_at, columns.id)
    )
    if until is not None:
        statement = statement.where(columns.written_at < until)
    return await read_undamaged(connection, statement, _batch, "batch of outcomes", columns.id, OUTCOME_BATCHES)


def _batch(row: RowMapping) -> OutcomeBatch:
    if not isinstance(row["outcomes"], list) or not all(isinstance(one, dict) for one in row["outcomes"]):
        raise TypeError("outcomes")
    return OutcomeBatch(**row)


async def _record(connection: AsyncConnection, rollout: Rollout, by: AuditContext, verb: str) -> None:
    names = ("stable", "candidate", "percent", "reason")
    detail = {"rollout": rollout.id} | {name: getattr(rollout, name) for name in names}
    await record_action(connection, by, f"rollout.{verb}", rollout.model, detail=detail)
