"""`llmops prefix explain`: where request bodies part, through a gateway."""

import asyncio
import json

from click.testing import CliRunner

from llmops.cli.main import cli
from llmops.cli.prefix_comparison import PromptDifference, compare_prompts
from llmops.errors import LlmopsError

RULES = " ".join(f"Rule {number} says nothing of any kind." for number in range(12))


def test_prompts_part_and_agree_again():
    common, rest = list(range(100)), list(range(200, 300))
    assert compare_prompts(common, [*common, *rest]) == []
    replaced = compare_prompts([*common, 1, 2, *rest], [*common, 3, *rest])
    assert replaced == [PromptDifference(100, 101, 100, 102, 100, 200)]
    inserted = compare_prompts([*common, *rest], [*common, 7, 8, *rest])
    assert inserted == [PromptDifference(100, 102, 100, 100, 100, 200)]
    assert [one.equal_after for one in compare_prompts([1, *common, 2, *rest], [3, *common, 4, *rest])] == [100, 200]
    assert compare_prompts(common, rest) == [PromptDifference(0, 100, 0, 100, 0, 0)]
    assert compare_prompts([], [1]) == compare_prompts([1], []) == []


async def explain(stack, folder, *bodies, options=("--json",)):
    files = [folder / f"{number}.json" for number in range(len(bodies))]
    for file, body in zip(files, bodies, strict=True):
        file.write_text(body if isinstance(body, str) else json.dumps(body))
    words = ["prefix", "explain", *map(str, files), "--url", str(stack.client.base_url), *options]
    return await asyncio.to_thread(CliRunner().invoke, cli, words)


def chat(system: str) -> dict:
    return {"model": "other", "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]}


async def test_a_time_at_the_top_is_named_with_what_it_costs(stack, tmp_path):
    bodies = [chat(f"It is {hour}. {RULES}") for hour in ("10:31", "11:58")]
    run = await explain(stack, tmp_path, *bodies)
    assert run.exit_code == 0, run.output
    (report,) = json.loads(run.stdout)
    assert report["cached"] == 0
    assert "1:58" in report["differences"][0]["text"] or "11" in report["differences"][0]["text"]
    assert report["differences"][-1]["cached_without"] >= 0.9 * report["tokens"] - 32
    assert "1. The prompts part at token" in (await explain(stack, tmp_path, *bodies, options=())).output


async def test_bodies_of_every_api_and_what_the_gateway_leaves_out(stack, tmp_path):
    def session(header: str) -> dict:
        system = [{"type": "text", "text": text} for text in [f"x-anthropic-billing-header: {header}", RULES]]
        return {"model": "claude", "max_tokens": 5, "system": system, "messages": [{"role": "user", "content": "Hi"}]}

    run = await explain(stack, tmp_path, session("a"), session("b"))
    assert run.exit_code == 0, run.exception
    (report,) = json.loads(run.stdout)
    assert (report["left_out"], report["differences"]) == (["system.x-anthropic-billing-header"], [])
    assert report["cached"] >= report["tokens"] - 32
    lines = "\n".join(json.dumps(one) for one in ({"model": "x", "instructions": RULES, "input": "Hi"}, chat(RULES)))
    (report,) = json.loads((await explain(stack, tmp_path, lines)).stdout)
    assert (report["prompt"][-8:], report["differences"]) == ("0.json:2", [])


async def test_what_is_no_request_body_is_said(stack, tmp_path):
    for bodies, said in [
        ([chat("a")], "name a second request body"),
        (["{", chat("a")], "is not JSON"),
        (["[1]", chat("a")], "a request body is a JSON object"),
        ([{"model": "x"}, chat("a")], "it has neither `messages` nor `input`"),
        ([{"input": 5, "model": "x"}, chat("a")], "is not a request body: "),
        ([chat("\ud800"), chat("a")], "has half of a surrogate pair"),
    ]:
        run = await explain(stack, tmp_path, *bodies)
        assert (run.exit_code != 0, isinstance(run.exception, LlmopsError | SystemExit)) == (True, True), run.exception
        assert said in f"{run.output} {run.exception}"
