"""Flags win over the environment, that over the file, that over the defaults."""

import os

import pytest

from llmops.errors import InputError
from llmops.gateway.settings import load_settings


def test_order(tmp_path, monkeypatch):
    config = tmp_path / "gateway.yaml"
    config.write_text(
        "triton: file:1\nhost: 0.0.0.0\nport: 1111\ntimeouts: {idle: 5s, total: 6s}\n"
        "models: {smollm2: {tokenizer_dir: /srv/tokenizer}}\n"
    )
    for name, value in {"PORT": "2222", "TRITON": "env:2", "TIMEOUTS__IDLE": "7s"}.items():
        monkeypatch.setenv(f"LLMOPS_{name}", value)
    monkeypatch.delenv("LLMOPS_TIMEOUTS__CONNECT", raising=False)
    settings = load_settings(config, triton="flag:3", port=None)
    assert (settings.triton, settings.port, settings.host) == ("flag:3", 2222, "0.0.0.0")
    assert (settings.timeouts.idle, settings.timeouts.total, settings.timeouts.connect) == (7, 6, 5)
    assert settings.models["smollm2"].metadata_fields() == {"tokenizer_dir": "/srv/tokenizer"}


def test_defaults_also_of_a_file_that_holds_nothing_and_beside_variables_of_other_commands(tmp_path, monkeypatch):
    for name in ("CACHE", "API_KEY"):
        monkeypatch.setenv(f"LLMOPS_{name}", "/x")
    settings = load_settings()
    assert (settings.triton, settings.port) == ("127.0.0.1:8001", 9000)
    (tmp_path / "gateway.yaml").write_text("# nothing\n")
    assert load_settings(tmp_path / "gateway.yaml").model_dump() == settings.model_dump()


def test_what_cannot_be_read(tmp_path):
    for place, why in ((tmp_path, "Is a directory"), (tmp_path / "none.yaml", "No such file or directory")):
        with pytest.raises(InputError, match=rf" cannot be read \({why}\); name a YAML file"):
            load_settings(place)


def test_sections_of_file_and_environment_are_laid_over_each_other(tmp_path, monkeypatch):
    config = tmp_path / "gateway.yaml"
    config.write_text("models: {a: {vocab_size: 5, target: x}, b: {target: y}}\n")
    monkeypatch.setenv("LLMOPS_MODELS__A__VOCAB_SIZE", "7")
    monkeypatch.setenv("LLMOPS_LIMITS", '{"queued": 3}')
    settings = load_settings(config)
    found = {name: (model.vocab_size, model.target) for name, model in settings.models.items()}
    assert (found, settings.limits.queued, settings.limits.tools) == ({"a": (7, "x"), "b": (None, "y")}, 3, 128)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LIMITS", "{many", "The environment variable LLMOPS_LIMITS is not JSON"),
        ("TIMEOUTS__IDEL", "1", r"Unknown setting `timeouts\.idel` .*did you mean `idle`\?"),
        ("TRITOM", "x:1", "LLMOPS_TRITOM is an unknown setting; did you mean LLMOPS_TRITON"),
    ],
)
def test_an_environment_variable_that_cannot_be_used(monkeypatch, name, value, said):
    monkeypatch.setenv(f"LLMOPS_{name}", value)
    with pytest.raises(InputError, match=said):
        load_settings()


def test_an_unknown_flag():
    with pytest.raises(InputError, match=r"Unknown setting `tritons`.*did you mean `triton`\?"):
        load_settings(tritons="x:1")


CLOUD = "providers: {cloud: {url: 'https://localhost/v1'}}\n"
ISSUER = "issuer: https://login.example"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tritom: x:1\n", "Unknown setting `tritom`.*did you mean `triton`"),
        ("timeouts: {keep_alive: 1}\n", r"Unknown setting `timeouts\.keep_alive`.*did you mean `keepalive`"),
        ("zzz: 1\n", r"Unknown setting `zzz` \(flags, environment or .*gateway\.yaml\); docs/gateway\.md lists"),
        ("models: {smollm2: {tokeniser_dir: /x}}\n", r"`models\.smollm2\.tokeniser_dir`.*did you mean `tokenizer_dir`"),
        ("- {host: x, port: 1}\n", "must be a mapping"),
        ("text\n", "must be a mapping"),
        ("quotas: {each: {rpm: 0}}", r"`quotas\.each\.rpm`.*greater than 0"),
        ("quotas: {all: {concurrent: 10000000000}}", r"`quotas\.all\.concurrent`.*at most 1000000000"),
        ("quotas: {models: {tiny: {rmp: 5}}}", r"did you mean `rpm`"),
        ("safety: {filters: {a: {kind: rules, patern: {x: y}}}}", r"did you mean `patterns`"),
        ("safety: {filters: {a: {kind: http, urll: 'http://x'}}}", r"did you mean `url`"),
        ("redis: http://u:secret@host", r"`redis`.*not the URL of a Redis"),
        ('redis: "redis://:pass@secret#rest@host:6379/0"', r"`redis`.*in a password as %40"),
        ("redis: redis://u:secret@host:99999/0", r"`redis`.*not the URL of a Redis"),
        ("oidc: {issuer: login.example, audience: a}", "not a URL"),
        ("oidc: {issuer: 'http://login.example', audience: a}", "can read or change what is sent without https"),
        (f"oidc: {{{ISSUER}}}", "`oidc.audience`"),
        (f"oidc: {{{ISSUER}, audience: a, algorithms: [HS256]}}", "RS256"),
        (f"{CLOUD}aliases: {{a: [cloud/big, tiny]}}", "must name models of this gateway first"),
        (f"{CLOUD}aliases: {{a: [b], b: [a]}}", "names the alias b"),
        (f"{CLOUD}aliases: {{a: {{small: b, large: c, overflow: [d]}}}}", "must name models of providers"),
        ("providers: {cloud: {url: 'http://cloud.example/v1'}}", "without https"),
        ("providers: {cloud: {url: 'https://user:secret@cloud.example/v1'}}", "a key in a URL appears in logs"),
        ("providers: {cloud: {url: 'https://a.example/v1', key_env: A, key_file: b}}", "set exactly one of"),
        ("providers: {cloud: {url: 'https://a.example/v1', key_env: sk-hunter2}}", "and not the key"),
        ("providers: {cloud: {url: 'https://a.example/v1', key: secret}}", "Unknown setting `providers.cloud.key`"),
    ],
)
def test_a_wrong_file(tmp_path, text, said):
    config = tmp_path / "gateway.yaml"
    config.write_text(text)
    with pytest.raises(InputError, match=said) as refused:
        load_settings(config)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1:8001", ":8001", "triton:99999", "triton:"])
def test_an_address_that_is_none_of_triton_s_is_refused(address):
    with pytest.raises(InputError, match=r"The setting `triton`.*HOST:PORT"):
        load_settings(triton=address)


@pytest.mark.parametrize("address", ["triton:8001", "[::1]:8001", "dns:///triton.models.svc:8001", "unix:/run/triton"])
def test_every_name_that_grpc_knows_is_taken(address):
    assert load_settings(triton=address).triton == address


@pytest.mark.parametrize(
    ("alias", "said"),
    [
        ("{small: b, large: c, tires: {a: large}}", r"Unknown setting `aliases\.a\.tires`"),
        ("{small: b, large: c, prompt_characters: -1}", r"`aliases\.a\.prompt_characters`.*greater than 0"),
        ("{small: b}", r"`aliases\.a\.large`.*it is required"),
        ("b", r"`aliases\.a`.*it must be a list"),
        ("[]", r"`aliases\.a`.*it must not be empty"),
    ],
)
def test_an_alias_that_is_wrong_is_named(tmp_path, alias, said):
    """Before the fix, a misspelt setting of an alias ended the gateway with a traceback."""
    (tmp_path / "gateway.yaml").write_text(f"aliases: {{a: {alias}}}")
    with pytest.raises(InputError, match=said):
        load_settings(tmp_path / "gateway.yaml")


NAMED_FILES = {
    "aliases.a.head": "aliases: {{a: {{small: b, large: c, head: {}}}}}",
    "quality.prompts": "quality: {{interval: 5m, prompts: {}}}",
    "safety.filters.words": "safety: {{filters: {{words: {{kind: rules, words_file: {}}}}}}}",
    "safety.filters.model": "safety: {{filters: {{model: {{kind: model, head: {}}}}}}}",
    "providers.x.key_file": "providers: {{x: {{url: https://x.example/v1, key_file: {}}}}}",
    "kafka.signing_keys_file": "kafka: {{servers: k:1, signing_keys_file: {}}}",
}


@pytest.mark.parametrize("setting", NAMED_FILES)
def test_a_setting_names_a_regular_file(tmp_path, setting):
    """Before the fix, the gateway's start waited for ever for what another process would write to a pipe."""
    config, pipe, link = tmp_path / "gateway.yaml", tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    for named in (pipe, "/dev/zero", tmp_path):
        config.write_text(NAMED_FILES[setting].format(named))
        with pytest.raises(InputError, match=rf"`{setting}.*{named} is not a regular file"):
            load_settings(config)
    # Kubernetes mounts secrets as links
    (tmp_path / "file").touch()
    link.symlink_to("file")
    config.write_text(NAMED_FILES[setting].format(link))
    load_settings(config)
