"""The rehearsal of a roll-out: two real Tritons on this machine, a steady load, and a report."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from llmops.cli.accounts.admin_client import AdminClient
from llmops.cli.local_replicas import last_line
from llmops.control.rollouts.schemas import RolloutCreate, RolloutQuery, RolloutRead
from llmops.errors import ServerError
from llmops.gateway.routing.quality.golden_prompts import load_golden_prompts
from llmops.perf.rehearsal import CANDIDATE, RehearsalLoad, RehearsalReport, make_report
from llmops.process import module_command, with_parent_death_signal

#: Maximum seconds for a stack to start. Enough to load the model on a busy machine.
START_TIMEOUT = 300.0
#: Maximum seconds for a roll-out to end. Its steps take minutes.
ROLLOUT_TIMEOUT = 1800.0
#: Maximum seconds for a stack to stop. Its answers are short.
STOP_TIMEOUT = 60.0
#: Rate of the offered requests as a share of the slower version's capacity. One replica must be
#: able to serve all of them.
LOAD_SHARE = 0.4
#: Seconds of load before the roll-out starts, and after its end.
MARGIN = 15.0
#: Percent of the requests that the new version gets in the first step: half, for two replicas.
PERCENT = 50.0
#: Requests of the new version in a step. Fewer than by default, so that a rehearsal takes minutes.
MIN_REQUESTS = 60
#: Maximum tokens of an answer to a golden prompt, which shares the machine with the load.
QUALITY_TOKENS = 12
#: Time between two sweeps of the golden prompts, short enough for several during a roll-out.
QUALITY_INTERVAL = "45s"


async def rehearse(old: Path, new: Path, fault: str, report: Callable[[str], None]) -> RehearsalReport:
    """Run a roll-out under load, and return a report.

    Args:
        old: The engine folder of the old version.
        new: The engine folder of the new version.
        fault: The fault to plant into the new version, or an empty string.
        report: Called with a line of text for each step.

    Raises:
        ServerError: A stack does not start, or the roll-out does not end.
    """
    capacity, quality = {}, {}
    # golden prompts get short answers, because they share two cores with the load
    prompts = [replace(prompt, max_tokens=QUALITY_TOKENS) for prompt in load_golden_prompts(None)]
    with tempfile.TemporaryDirectory(prefix="llmops-rehearsal-") as folder:
        report("Measuring the capacity of the new version alone …")
        async with _stack(new, Path(folder, "new"), "") as (url, model, _):
            load = RehearsalLoad(url, model)
            capacity["new"], quality["new"] = await load.measure_capacity(), await load.measure_quality(prompts)
        report(f"{_measured(capacity, quality, 'new')} Starting the old version, and measuring it …")
        golden = Path(folder, "golden.jsonl")
        golden.write_text("".join(f"{json.dumps(prompt.data())}\n" for prompt in prompts))
        watched = {"LLMOPS_QUALITY__INTERVAL": QUALITY_INTERVAL, "LLMOPS_QUALITY__PROMPTS": str(golden)}
        async with _stack(old, Path(folder, "old"), fault, watched) as (url, model, store):
            load = RehearsalLoad(url, model)
            capacity["old"], quality["old"] = await load.measure_capacity(), await load.measure_quality(prompts)
            rate = round(LOAD_SHARE * min(capacity.values()), 2)
            tolerance = round(max(quality["old"] - quality["new"], 0.0), 3)
            report(
                f"{_measured(capacity, quality, 'old')} A loss of {100 * tolerance:.1f} points is tolerated. Offering "
                f"{rate:.2f} requests/s from now on."
            )
            stop = asyncio.Event()
            running = asyncio.create_task(load.run(rate, stop))
            try:
                await asyncio.sleep(MARGIN)
                states, reason = await _roll_out(new, AdminClient(store), model, tolerance, report)
                await asyncio.sleep(MARGIN)
            finally:
                stop.set()
                await running
    measured = {"rate": rate, "capacity": capacity, "quality": quality, "quality_tolerance": tolerance}
    return make_report(load.records, states, reason=reason, fault=fault, **measured)


async def _roll_out(
    new: Path, admin: AdminClient, model: str, tolerance: float, report: Callable[[str], None]
) -> tuple[dict[str, float], str]:
    """Roll out the engine `new`, and report each state until the roll-out has ended.

    Return the time at which each state first began, and the reason of the last state. `tolerance`
    is the mean score that the new version may lose on golden prompts.
    """
    body = RolloutCreate(
        model=model,
        name=CANDIDATE,
        engine=str(new.resolve()),
        percent=PERCENT,
        auto=True,
        keep_old=MARGIN,
        min_requests=MIN_REQUESTS,
        min_seconds=10,
        quality_tolerance=tolerance,
    )
    await asyncio.to_thread(admin.request, "POST", ("rollouts",), RolloutRead, body=body)
    states: dict[str, float] = {}
    seen = ""
    async with asyncio.timeout(ROLLOUT_TIMEOUT):
        while True:
            await asyncio.sleep(0.5)
            query = RolloutQuery(model=model)
            found = await asyncio.to_thread(admin.request, "GET", ("rollouts",), tuple[RolloutRead, ...], query=query)
            now = found[0]
            states.setdefault(now.state, now.changed_at.timestamp())
            if (state := f"{now.state}, {now.percent:g} %") != seen:
                seen = state
                report(f"{state}: {now.reason}")
            if not now.open:
                return states, now.reason


def _measured(capacity: Mapping[str, float], quality: Mapping[str, float], version: str) -> str:
    return f"{capacity[version]:.2f} answers/s, {100 * quality[version]:.0f} % of the golden prompts answered right."


@asynccontextmanager
async def _stack(
    engine: Path, folder: Path, fault: str, settings: Mapping[str, str] = {}
) -> AsyncIterator[tuple[str, str, str]]:
    """Serve an engine, and yield the gateway's URL, the model and the store.

    Raises ServerError with the end of the log if the stack does not start.
    """
    folder.mkdir()
    store, log_path = f"sqlite:///{folder / 'store.db'}", folder / "log"
    command = module_command("llmops.cli.rehearsal_stack", str(engine.resolve()), str(folder), store, fault)
    with open(log_path, "wb") as log:
        process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=os.environ | settings,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT):
            while not (line := (await process.stdout.readline()).decode()).startswith("READY "):
                if not line:
                    raise ServerError(f"The rehearsal could not serve {engine}: {last_line(log_path.read_bytes())}")
        _, url, model = line.split()
        drain = asyncio.create_task(process.stdout.read())
        yield url, model, store
        drain.cancel()
    except TimeoutError:
        raise ServerError(
            f"{engine} was not ready after {START_TIMEOUT:g} s: {last_line(log_path.read_bytes())}"
        ) from None
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await process.wait()
            except TimeoutError:
                process.kill()
