"""Tests of the faults that are rejected in YAML files.

The message has the line and what to write instead.
"""

import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmops.errors import InputError
from llmops.gateway.settings import GatewaySettings, load_settings
from llmops.units import parse_duration
from llmops.yaml_files import is_plain, read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: 1\nhost: x\nport: 2\n", "has the key `port` twice, in lines 1 and 3; keep one of them."),
        ("limits:\n  tools: 1\n  tools: 2\n", "has the key `tools` twice, in lines 2 and 3; keep one of them."),
        *(
            (text, f"is not valid YAML (line {line}, column {column}): indent with spaces, close all quotes and ")
            for text, line, column in (
                ("a: b: c", 1, 5), ("\ta: 1", 1, 1), ("a: [1", 1, 6), ("a: 'x", 1, 6), ("a: *b", 1, 4),
                ("a: !b 1", 1, 4), ("a: @b", 1, 4), ("- a\nb: 1", 2, 1),
            )
        ),
        ("a: \0", "is not valid YAML (line 1): a character there cannot be printed; remove it."),
        (b"a: 1\nb: \xff", "is not text in UTF-8 (line 2); save it as UTF-8."),
    ],
)  # fmt: skip
def test_a_file_that_is_no_yaml_is_refused_with_its_line(tmp_path, text, said):
    path = tmp_path / "gateway.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (read_yaml, load_settings):
        with pytest.raises(InputError) as refused:
            read(path)
        assert refused.value.message.startswith(f"{path} {said}")
        assert refused.value.message.endswith(".")
        assert "unicode string" not in refused.value.message


def test_merged_keys_may_be_overwritten(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: &b {x: 1}\nown: {<<: *b, x: 2}\n")
    assert read_yaml(path)["own"] == {"x": 2}


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("timeouts: {idle: 60}", "`timeouts.idle`", "60 has no unit; write 60ms or 60s"),
        ("timeouts: {idle: 0.5}", "`timeouts.idle`", "0.5 has no unit; write 0.5ms or 0.5s"),
        ("slo: {availability: 101%}", "`slo.availability`", "'101%' is not a share below 100 %; write 99.9% or 0.999"),
        ("slo: {tiers: {gold: {ttft_p99: 1s}}}", "`tiers`", "`slo.tiers` names gold, which is not a tier"),
        ("degraded: {}", "`degraded`", "it depends on the gateway's queue"),
        ("slo: {ttft_p95: 500}", "`slo.ttft_p95`", "500 has no unit; write 500ms or 500s"),
        ("timeouts: {idle: 0}", "`timeouts.idle`", "it must be above zero, such as 500ms or 0.5s"),
        ("resume: {lease: 20s}", "`resume.lease`", "it must be at most 6"),
        ("oidc: {issuer: 'https://a.b', audience: a, leeway: 10m}", "`oidc.leeway`", "it must be at most 300"),
        ("tiers: {a: {max_wait: 5}}", "`tiers.a.max_wait`", "5 has no unit; write 5ms or 5s"),
        ("port: 70000", "`port`", "it must be at most 65535"),
        ("quotas: {each: {rpm: many}}", "`quotas.each.rpm`", "it must be a whole number"),
        ("usage: {when_full: wait}", "`usage.when_full`", "it must be 'refuse' or 'serve'"),
        ("open: perhaps", "`open`", "it must be true or false"),
        ("limits: 5", "`limits`", "it must be a mapping of names to values"),
        ("triton: nowhere", "`triton`", "'nowhere' is not HOST:PORT; write an address"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_in_our_words(tmp_path, text, place, said):
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        load_settings(path)
    assert refused.value.message.startswith(f"The setting {place} (flags, environment or {path}) is not usable: {said}")


def test_durations_have_a_unit_and_zero_needs_none():
    timeouts = GatewaySettings(timeouts={"keepalive": 0, "idle": "1.5m", "drain": "0s"}).timeouts
    assert (timeouts.keepalive, timeouts.idle, timeouts.drain) == (0, 90, 0)
    kept = GatewaySettings(timeouts={"idle": "250ms"}).model_dump(mode="json", exclude_defaults=True)
    assert (kept["timeouts"]["idle"], GatewaySettings(**kept).timeouts.idle) == ("250ms", 0.25)


def test_a_long_number_is_no_duration_in_linear_time():
    began = time.thread_time()
    for text in ("1" * 20_000, "1" * 20_000 + "x"):
        with pytest.raises(ValueError, match=r"no unit|not a duration"):
            parse_duration(text)
    assert time.thread_time() - began < 1


@given(st.text() | st.from_regex(r"[-+.0-9_xobeEyYnN:]{1,8}", fullmatch=True))
def test_a_written_text_is_read_as_the_same_text(text):
    assert yaml.safe_load(write_yaml({text: [text]})) == {text: [text]}


@pytest.mark.parametrize(
    "text", ["y", "N", "no", "null", "~", "1e3", "08", "0o17", "0B1", "1_0e-3", ".5E3", "1:20", ""]
)
def test_a_text_that_a_reader_takes_for_another_value_is_quoted(text):
    assert not is_plain(text)
    assert is_plain(f"a{text}b")
    assert yaml.safe_load(write_yaml([1000, 1e20, True, None])) == [1000, 1e20, True, None]
