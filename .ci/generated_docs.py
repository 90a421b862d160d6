"""The generated parts of the pages in docs/, as Markdown.

`make docs` writes them into the pages with cog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from llmops import contract
from llmops.contract import Tensor

if TYPE_CHECKING:
    import click


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def engine_inputs() -> str:
    return _tensors("Input", [one for one in contract.ENGINE_INPUTS if one.taken], _bounded)


def own_inputs() -> str:
    return _tensors("Input", contract.EXTENSION_INPUTS, _bounded)


def step_inputs() -> str:
    return _tensors("Input", contract.STEP_INPUTS, lambda one: one.meaning)


def step_outputs() -> str:
    return _tensors("Output", contract.STEP_OUTPUTS, lambda one: one.meaning)


def neutral_values() -> str:
    """Return the inputs that our models take with these values only."""
    named = [one for one in contract.ENGINE_INPUTS if one.neutral]
    values = (f"`{one}` {' or '.join(str(value).lower() for value in one.neutral)}" for one in named)
    return fill(", ".join(values) + ".", 100, break_on_hyphens=False)


def model_metadata() -> str:
    fields = _meanings("Field", "Meaning", contract.METADATA_FIELDS)
    return fields + "\n\n" + _meanings("Capability", "Request fields", contract.CAPABILITIES)


def step_flags() -> str:
    flags = {
        contract.LAST_OF_SEQUENCE: "last entry of the sequence",
        contract.LAST_OF_SLOT: "last entry of the slot",
        contract.ERROR_FLAG: "error",
        contract.CANCELLED_FLAG: "cancelled",
        contract.FIRST_OF_SLOT: "first entry of the slot",
    }
    return fill("Flags: " + ", ".join(f"{flag} {what}" for flag, what in flags.items()) + ".", 100)


def state_fields() -> str:
    return "\n" + _meanings("Number", "What", contract.STATE_FIELDS) + "\n"


def formats() -> str:
    from llmops.build.quant_formats import FORMATS

    rows = []
    for form in FORMATS.values():
        if form.made_here and form.name != "none":
            later = " (`tensorrt`: quantised by trtllm-build)" if form.quantized_by_builder else ""
            rows.append((f"`{form.name}`", form.summary + later, ", ".join(sorted(form.targets))))
    return table(("Format", "Numbers", "Targets"), rows)


def quality_limits() -> str:
    from llmops.build.quant_formats import FORMATS

    rows = []
    for form in FORMATS.values():
        if form.made_here and (loss := form.loss) and loss.max_weight_error is not None:
            limits = f"{loss.max_ppl_ratio:g}", f"{loss.min_top1:.2f}", f"{loss.max_mean_kl:g}"
            rows.append((f"`{form.name}`", *limits, f"{100 * loss.max_weight_error:g}%"))
    return table(("", "perplexity ratio", "top-1 agreement", "mean KL", "one weight"), rows)


def gateway_metrics() -> str:
    from llmops.gateway.telemetry.metric_definitions import GATEWAY_METRICS

    return _metrics(GATEWAY_METRICS)


def room_metrics() -> str:
    from llmops.gateway.telemetry.metric_definitions import OPTIONAL_METRICS

    return _metrics(OPTIONAL_METRICS)


def commands() -> str:
    """Return a table of commands under each heading of `llmops --help`."""
    import click

    from llmops.cli.main import COMMANDS, SECTIONS, cli

    group = click.Context(cli, info_name="llmops")
    lines = []
    for heading, names in SECTIONS.items():
        lines += ["", f"## {heading}", "", "| Command | |", "|---|---|"]
        lines += [f"| {_usage(name, group)} | {COMMANDS[name]} |" for name in names]
    return "\n".join(lines) + "\n"


def _usage(name: str, parent: click.Context) -> str:
    """Return a command with its arguments, or a group with its subcommands."""
    import click

    from llmops.cli.main import cli

    command = cli.get_command(parent, name)
    assert command is not None, name
    context = click.Context(command, info_name=name, parent=parent)
    if isinstance(command, click.Group):
        return f"`{context.command_path}` " + ", ".join(f"`{inner}`" for inner in command.commands)
    arguments = [one.make_metavar(context) for one in command.params if isinstance(one, click.Argument)]
    return "`" + " ".join([context.command_path, *arguments]).replace("|", r"\|") + "`"


def _tensors(title: str, tensors: Iterable[Tensor], meaning: Callable[[Tensor], str]) -> str:
    rows = []
    for one in tensors:
        sizes = ",".join(["1", *("n" if size == -1 else str(size) for size in one.dims)])
        rows.append((f"`{one}`", f"{one.datatype} [{sizes}]", meaning(one)))
    return table((title, "Type", "Meaning"), rows)


def _bounded(one: Tensor) -> str:
    bounds = f"; {one.bounds[0]:g} to {one.bounds[1]:g}" if one.bounds and one.bounds[1] < 1000 else ""
    return f"{one.meaning}{bounds}{'' if one.optional else '; required'}"


def _meanings(name: str, meaning: str, entries: Mapping[str, str]) -> str:
    return table((name, meaning), [(f"`{one}`", text) for one, text in entries.items()])


def _metrics(names: Iterable[object]) -> str:
    rows = [(f"`{one.name}`", one.kind, ", ".join(one.labels) or "–", one.meaning) for one in names]  # type: ignore[attr-defined]
    return table(("Name", "Kind", "Labels", ""), rows)
