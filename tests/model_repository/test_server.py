"""The engine model and the ensemble on the real Triton, with the real small model."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from llmops.model_repository.repository.manifest import RepositoryManifest
from tests.support.engine_client import EngineClient, generation, metrics
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

END = 2
TEXTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a line of emoji 🎉👩‍🚀🇫🇷 and one in Chinese: 你好<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "Les élèves français",
    "数字は一、二、",
]


@pytest.fixture(scope="module")
def tokenizer(engine_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(engine_dir / "tokenizer" / "tokenizer.json"))


@pytest.fixture
def client(triton: Any) -> Iterator[EngineClient]:
    client = EngineClient(triton.grpc_address)
    yield client
    client.close(cancel=True)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(TEXTS[0], add_special_tokens=False).ids


def ensemble(triton: Any, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """Responses of the ensemble over HTTP, as a client without any library of ours sees them."""
    url = f"{triton.http_url}/v2/models/smollm2/generate{'_stream' if stream else ''}"
    body = {"max_tokens": 24, "temperature": 0.0, "stream": stream, **fields}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read().decode()
    if not stream:
        return [json.loads(text)]
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_a_server_edits_nothing_in_its_repository(triton: Any, repository: Path) -> None:
    """Before the fix, it wrote byte code: the next start said "was edited", and `--strict` refused it."""
    assert triton.is_ready()
    assert RepositoryManifest.load(repository).edits(repository) == []


def test_streamed_tokens_are_those_of_one_response(client, prompt, tokenizer):
    streamed = client.ask(prompt)
    whole = client.ask(prompt, streaming=False)
    assert streamed.ids == whole.ids
    assert (len(streamed.responses), len(whole.responses)) == (len(streamed.ids), 1)
    assert tokenizer.decode(streamed.ids) == "The capital of France is Paris."
    assert streamed.ids[-1] == END


def test_requests_join_and_leave_the_batch_and_do_not_disturb_each_other(client, tokenizer):
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    alone = [client.ask(ids, new=4 + 3 * index).ids for index, ids in enumerate(prompts)]
    for index, ids in enumerate(prompts):
        client.send(f"r{index}", **generation(ids, new=4 + 3 * index))
    together = client.collect(len(prompts))
    assert [together[f"r{index}"].ids for index in range(len(prompts))] == alone


BROKEN = [("json_schema", "{"), ("json_schema", '{"type": "none"}'), ("regex", "((("), ("ebnf_grammar", "root = = 5")]


def test_broken_guides_are_refused_and_harm_nobody(client: EngineClient, prompt: list[int]) -> None:
    expected = client.ask(prompt, new=30, end_id=-1).ids
    client.send("innocent", **generation(prompt, new=30, end_id=-1))
    seen = [client.receive() for _ in range(3)]
    for number, (kind, guide) in enumerate(BROKEN):
        broken = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
        client.send(f"guilty-{number}", **generation(prompt, **broken))
    seen += [client.receive() for _ in range(27 + len(BROKEN))]
    errors = [error for *_, error in seen if error]
    assert len(errors) == len(BROKEN)
    assert all(error.startswith("guided_decoding_guide: ") for error in errors)
    answers = [tensors["output_ids"] for _, tensors, _, _ in seen if "output_ids" in tensors]
    assert [int(token) for ids in answers for token in ids.flat] == expected


def test_lengths_of_requests_are_counted(triton: Any, client: EngineClient, prompt: list[int]) -> None:
    def sums() -> list[float]:
        names = ("nv_llm_input_token_len_sum", "nv_llm_output_token_len_sum", "nv_llm_output_token_len_count")
        return [sum(metrics(triton.metrics_url, name).values()) for name in names]

    def sums_after(seconds: float) -> list[float]:
        time.sleep(seconds)
        return sums()

    # what earlier tests asked for is reported within a tenth of a second of its end
    before = sums()
    while (seen := sums_after(0.3)) != before:
        before = seen
    answer = client.ask(prompt, new=7, end_id=-1)
    wanted = [before[0] + len(prompt), before[1] + len(answer.ids), before[2] + 1]
    wait_until(lambda: sums() == wanted)


def test_a_prompt_longer_than_one_step_is_cut_into_chunks(client: EngineClient, tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > 300
    assert "The quick brown fox jumps" in tokenizer.decode(client.ask(ids, new=9).ids)


def test_ensemble_texts_are_one_shot_decodings_of_the_engines_tokens_also_when_interleaved(triton, client, tokenizer):
    for index, text in enumerate(TEXTS):
        client.send(f"r{index}", **generation(tokenizer.encode(text).ids, new=24))
    answers = client.collect(len(TEXTS))
    expected = [tokenizer.decode(answers[f"r{index}"].ids) for index in range(len(TEXTS))]
    barrier = threading.Barrier(3 * len(TEXTS))

    def ask(text: str, stream: bool) -> list[str]:
        barrier.wait()
        return [one["text_output"] for one in ensemble(triton, stream, text_input=text)]

    asked = [(text, stream) for stream in (False, True, True) for text in TEXTS]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: ask(*one), asked))
    assert ["".join(chunks) for chunks in found] == expected * 3
    for (_, stream), chunks in zip(asked, found, strict=True):
        assert len(chunks) > 1 if stream else len(chunks) == 1
        assert all("\ufffd" not in chunk for chunk in chunks[:-1])


def test_ensemble_takes_nvidias_other_inputs(triton: Any) -> None:
    question = {"text_input": TEXTS[0]}
    (stopped,) = ensemble(triton, stream=False, **question, stop_words=[" of France"])
    assert stopped["text_output"] == "The capital of France"
    (bad,) = ensemble(triton, stream=False, **question, return_log_probs=True)
    assert len(bad["output_log_probs"]) == 8
    with pytest.raises(urllib.error.HTTPError) as refusal:
        ensemble(triton, stream=True, **question, bad_words=["Paris"])
    assert "bad_words_list: not supported by target openvino" in refusal.value.read().decode()
