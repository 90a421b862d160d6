"""`llmops rollout` on a local store, without replicas."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmops.cli.key import command as key_command
from llmops.cli.rollout import SCALE, _mark, command
from llmops.cli.tenant import command as tenant_command
from tests.support.manifests import engine_manifest


@pytest.fixture
def run(tmp_path: Path):
    def call(*arguments: str, command=command) -> Result:
        return CliRunner().invoke(command, [*arguments, "--store", f"sqlite:///{tmp_path / 'store.db'}"])

    return call


def test_a_rollout_is_started_watched_pinned_and_rolled_back(run):
    assert "Start one" in run("status").stderr
    assert "Start one" in run("history").stderr
    run("create", "acme", command=tenant_command)
    key = json.loads(run("create", "--tenant", "acme", "--user", "a@b.c", "--json", command=key_command).stdout)
    refused = str(run("pin", "llama", key["id"], "v2").exception)
    assert "llama has no version v2; it has had no roll-out yet" in refused
    started = run("start", "llama", "--replica", "dns:llama-v2:8001", "--name", "v2", "--percent", "10")
    assert "llama: v2 starts beside initial" in started.output, started.output
    assert "next        wait; `llmops up` or `llmops control`" in run("status", "llama").output
    (found,) = json.loads(run("status", "llama", "--json").stdout)
    assert (found["state"], found["settings"]["percent"]) == ("starting", 10)
    assert [(one["name"], one["weight"]) for one in found["versions"]] == [("initial", 100), ("v2", 0)]
    assert f"{key['id']} gets v2 of llama" in run("pin", "llama", key["key"], "v2").output
    assert f"{key['id']} gets llama by the weights again" in run("pin", "llama", key["id"]).output
    assert "llama has no version v3; its versions are" in str(run("pin", "llama", key["id"], "v3").exception)
    assert "rolling back, 0 %" in run("rollback", "llama", "--reason", "a bad feeling").output
    assert "had to make room" not in run("history", "llama").output
    shown = run("status", "llama").output
    assert "a bad feeling" in shown
    assert "dns:llama-v2:8001" in shown
    assert "compared    with initial; TTFT for equal numbers of uncached tokens" in shown
    assert "rolling back" in run("history", "llama").output


def test_a_rollback_after_a_loss_of_capacity_says_that_replicas_start_again(run, tmp_path):
    engine = tmp_path / "v2"
    engine.mkdir()
    engine_manifest("openvino").save(engine)
    run("start", "llama", "--to", str(engine), "--allow-capacity-loss")
    said = run("rollback", "llama").output
    assert "Replicas of initial that had to make room start again." in said
    assert "took" not in said


@pytest.mark.parametrize(
    ("stable", "canary", "place"), [(100, 100, 9), (100, 200, 18), (10, 900, 18), (10, 1, 0), (0, 0, 9), (0, 1, 18)]
)
def test_the_plot_marks_how_many_times_the_old_value_the_new_one_is(stable, canary, place):
    assert _mark(stable, canary).index("●") == place
    assert len(_mark(stable, canary)) == len(SCALE)
    assert _mark(None, 1) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("start", "llama"), "Give the new version: --to ENGINE, or --replica HOST:PORT"),
        (("start", "llama", "--replica", "a:1", "--twin"), "leave out --twin and --allow-capacity-loss"),
        (("start", "llama", "--replica", "a:1", "--prometheus", "http://p:9090"), "give both --analysis"),
        (("start", "llama", "--replica", "nowhere"), "'nowhere' is not the address of a replica"),
        (("start", "llama", "--replica", "a:1", "--name", "v" * 65), "cannot name a version"),
        (("promote", "llama"), "The model llama has no roll-out in progress"),
        (("pin", "llama", "key-7", "v2"), "There is no key key-7; `llmops key list --all` shows all keys."),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code
    assert message in result.output + str(result.exception)


def test_a_second_rollout_and_an_early_promotion_say_what_to_do(run):
    run("start", "llama", "--replica", "a:1", "--name", "v2")
    assert "A roll-out of llama is in progress. Finish it first" in str(
        run("start", "llama", "--replica", "b:1", "--name", "v3").exception
    )
    assert "wait until its replicas are ready" in str(run("promote", "llama", "--full").exception)
