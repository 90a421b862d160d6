"""Flags win over the environment, that over the file, that over the defaults."""

from __future__ import annotations

import pytest

from llmops.errors import InputError
from llmops.gateway.settings import load_settings


def test_order(tmp_path, monkeypatch):
    config = tmp_path / "gateway.yaml"
    config.write_text(
        "triton: file:1\nhost: 0.0.0.0\nport: 1111\ntimeouts: {idle: 5, total: 6}\n"
        "models: {smollm2: {tokenizer_dir: /srv/tokenizer}}\n"
    )
    monkeypatch.setenv("LLMOPS_PORT", "2222")
    monkeypatch.setenv("LLMOPS_TRITON", "env:2")
    monkeypatch.setenv("LLMOPS_TIMEOUTS__IDLE", "7")
    settings = load_settings(config, triton="flag:3", port=None)
    assert settings.triton == "flag:3"
    assert settings.port == 2222
    assert settings.host == "0.0.0.0"
    assert (settings.timeouts.idle, settings.timeouts.total, settings.timeouts.connect) == (7, 6, 5)
    assert settings.models["smollm2"].card_fields() == {"tokenizer_dir": "/srv/tokenizer"}


def test_defaults():
    settings = load_settings()
    assert (settings.triton, settings.port) == ("127.0.0.1:8001", 9000)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_settings(tmp_path / "none.yaml")


def test_a_value_out_of_range(monkeypatch):
    monkeypatch.setenv("LLMOPS_LIMITS__BODY_BYTES", "-1")
    with pytest.raises(InputError, match=r"limits\.body_bytes"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tritom: x:1\n", "Unknown setting `tritom`"),
        ("port: many\n", "The setting `port`"),
        ("models: {smollm2: {tokeniser_dir: /x}}\n", r"Unknown setting `models\.smollm2\.tokeniser_dir`"),
        ("- a\n", "must be a mapping"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_a_wrong_file(tmp_path, text, said):
    config = tmp_path / "gateway.yaml"
    config.write_text(text)
    with pytest.raises(InputError, match=said):
        load_settings(config)


def test_a_misspelt_environment_setting(monkeypatch):
    monkeypatch.setenv("LLMOPS_TRITOM", "x:1")
    with pytest.raises(InputError, match="LLMOPS_TRITOM is an unknown setting; did you mean LLMOPS_TRITON"):
        load_settings()


def test_variables_of_other_commands_are_left_alone(monkeypatch):
    monkeypatch.setenv("LLMOPS_CACHE", "/x")
    monkeypatch.setenv("LLMOPS_API_KEY", "k")
    assert load_settings().port == 9000


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1:8001", ":8001", "triton:99999", "triton:"])
def test_an_address_that_is_none_of_triton_s_is_refused(address):
    with pytest.raises(InputError, match=r"The setting `triton`.*HOST:PORT"):
        load_settings(triton=address)


@pytest.mark.parametrize("address", ["triton:8001", "[::1]:8001", "dns:///triton.models.svc:8001", "unix:/run/triton"])
def test_every_name_that_grpc_knows_is_taken(address):
    assert load_settings(triton=address).triton == address
