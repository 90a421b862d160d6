"""Tests of the bytes of chat and text completions, token for token."""

import pytest

from llmops.gateway.api import ignored_fields
from tests.support.gateway_stack import BODIES, COMPLETIONS, END, running, text_of
from tests.support.scripted_triton import Step


async def test_a_plain_answer(stack):
    ids = stack.say("The capital of France is Paris.")
    response = await stack.chat()
    assert response.status_code == 200
    body = response.json()
    prompt = len(stack.tokenizer.encode("<user>Hello\n<assistant>"))
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "The capital of France is Paris.", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    kinds = ("reasoning", "audio", "accepted_prediction", "rejected_prediction")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(ids),
        "total_tokens": prompt + len(ids),
        "completion_tokens_details": {f"{kind}_tokens": 0 for kind in kinds},
    }
    assert response.headers["x-request-id"].startswith("req_")
    assert float(response.headers["x-llmops-overhead-ms"]) >= 0
    assert int(response.headers["openai-processing-ms"]) >= 0


async def test_a_streamed_answer(stack):
    stack.say("Hello world! 你好 🙂 é")
    events = await stack.events(stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (text_of(events), events[-1], events[-2]["choices"]) == ("Hello world! 你好 🙂 é", "[DONE]", [])
    assert events[-2]["usage"]["completion_tokens"] == len(stack.tokenizer.encode("Hello world! 你好 🙂 é"))
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert all(event["usage"] is None for event in events[:-2])
    assert len({event["id"] for event in events[:-1]}) == 1
    assert not any("\ufffd" in text_of([event]) for event in events)
    unasked = await stack.events()
    assert (unasked[-2]["choices"][0]["finish_reason"], any("usage" in event for event in unasked)) == ("stop", False)


async def test_the_engine_gets_what_was_asked(stack):
    stack.say("Hello")
    await stack.chat(temperature=0.5, top_p=0.9, top_k=7, seed=11, max_completion_tokens=9, frequency_penalty=0.25)
    sent = stack.triton.requests[-1]
    ids = stack.tokenizer.encode("<user>Hello\n<assistant>")
    assert (sent["model"], sent["input_ids"], sent["input_lengths"]) == ("tiny-tensorrt_llm", ids, [len(ids)])
    assert (sent["request_output_len"], sent["end_id"], sent["streaming"]) == ([9], [END], [True])
    assert (sent["temperature"], sent["runtime_top_p"], sent["runtime_top_k"]) == ([0.5], [pytest.approx(0.9)], [7])
    assert (sent["seed"], sent["frequency_penalty"], "presence_penalty" in sent) == ([11], [0.25], False)
    await stack.chat(temperature=0)
    assert stack.triton.requests[-1]["runtime_top_k"] == [1]
    await stack.chat()
    sent = stack.triton.requests[-1]
    assert (sent["temperature"], sent["runtime_top_p"], sent["runtime_top_k"]) == ([1.0], [1.0], [0])
    await stack.chat()
    assert stack.triton.requests[-1]["seed"] != sent["seed"], "an unset seed differs from request to request"
    await stack.chat(ignore_eos=True)
    assert stack.triton.requests[-1]["end_id"] == [-1]
    await stack.chat(stop_token_ids=[5, 6])
    sent = stack.triton.requests[-1]
    assert (sent["end_id"], sent["stop_words_list"]) == ([END], [5, 6, 1, 2])


async def test_the_models_own_sampling_holds_where_a_request_is_silent(card, tokenizer):
    card["sampling"] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    async with running(card, tokenizer) as stack:
        stack.say("Hello")
        await stack.chat()
        sent = stack.triton.requests[-1]
        assert (sent["temperature"], sent["runtime_top_k"]) == ([pytest.approx(0.6)], [20])
        assert (sent["runtime_top_p"], sent["repetition_penalty"]) == ([pytest.approx(0.9)], [pytest.approx(1.05)])
        assert "runtime_min_p" not in sent, "this engine has no min_p: nobody asked for it, so nobody is refused"
        await stack.chat(temperature=1, top_p=1, top_k=0, repetition_penalty=1)
        sent = stack.triton.requests[-1]
        assert (sent["temperature"], sent["runtime_top_p"], sent["runtime_top_k"]) == ([1.0], [1.0], [0])
        assert "repetition_penalty" not in sent
        assert (await stack.client.get("/v1/models/tiny")).json()["sampling"] == card["sampling"]
        response = (await stack.client.post("/v1/responses", json={"model": "tiny", "input": "x"})).json()
        assert (response["temperature"], response["top_p"]) == (0.6, 0.9), "a response shows what was used"
    # the operator's settings go back to OpenAI's
    async with running(card, tokenizer, models={"tiny": {"sampling": {}}}) as stack:
        stack.say("Hello")
        await stack.chat()
        assert stack.triton.requests[-1]["temperature"] == [1.0]


async def test_the_ending_token_or_no_more_tokens_are_stop_and_any_other_in_the_last_place_is_length(stack):
    for ends, room, reason in ((True, 90, "stop"), (False, 90, "stop"), (True, 1, "stop"), (False, 0, "length")):
        ids = stack.say("Hello world!", end=ends)
        body = (await stack.chat(max_tokens=len(ids) + room)).json()
        (choice,) = body["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello world!", reason)
        assert body["usage"]["completion_tokens"] == len(ids)


async def test_a_stop_string_is_never_sent_and_frees_the_engine(stack):
    stack.say("<answer>42</answer> and much more " + "text " * 30, wait=0.002)
    events = await stack.events(stop=["</answer>"])
    assert (text_of(events), events[-2]["choices"][0]["finish_reason"]) == ("<answer>42", "stop")
    await stack.idle()


async def test_several_choices(stack):
    first, second = stack.tokenizer.encode("Hello"), stack.tokenizer.encode("world!")
    stack.steps(*(Step((i,)) for i in (*first, END)), Step(tuple(second), sequence=1), Step(final=True))
    body = (await stack.chat(n=2, max_tokens=len(second))).json()
    assert stack.triton.requests[-1]["num_return_sequences"] == [2]
    found = [(choice["message"]["content"], choice["finish_reason"]) for choice in body["choices"]]
    assert found == [("Hello", "stop"), ("world!", "length")]
    assert body["usage"]["completion_tokens"] == len(first) + len(second)
    events = await stack.events(n=2, max_tokens=len(second))
    reasons = {e["choices"][0]["index"]: e["choices"][0]["finish_reason"] for e in events[:-1]}
    assert reasons == {0: "stop", 1: "length"}


async def test_logprobs_of_the_chosen_tokens(stack):
    ids = stack.tokenizer.encode("é!")
    steps = [Step((i,), logprobs=(-0.5 * at,)) for at, i in enumerate(ids)]
    stack.steps(*steps, Step((END,), logprobs=(-9.0,)), Step(final=True))
    content = (await stack.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert stack.triton.requests[-1]["return_log_probs"] == [True]
    assert [entry["logprob"] for entry in content] == [-0.5 * at for at in range(len(ids))]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "é!"
    parts = [event["choices"][0]["logprobs"] for event in (await stack.events(logprobs=True))[:-1]]
    assert [entry for part in parts if part for entry in part["content"]] == content


async def test_logprobs_of_a_stop_string_are_not_sent(stack):
    stack.steps(*(Step((i,), logprobs=(-1.0,)) for i in stack.tokenizer.encode("Hello</answer>")), Step(final=True))
    content = (await stack.chat(logprobs=True, stop="</answer>")).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "Hello"


async def test_text_completions(stack):
    ids = stack.say(" world!")
    body = (await stack.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "max_tokens": 20})).json()
    assert stack.triton.requests[-1]["input_ids"] == stack.tokenizer.encode("Hello")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": " world!", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["completion_tokens"] == len(ids)


async def test_text_completions_of_several_prompts(stack):
    texts = {True: (*stack.tokenizer.encode("one"), END), False: (*stack.tokenizer.encode("two"), END)}
    stack.triton.script = lambda tensors: [Step(texts[tensors["input_ids"] == [5, 6]]), Step(final=True)]
    body = (await stack.client.post("/v1/completions", json={"model": "tiny", "prompt": [[7], [5, 6]], "n": 1})).json()
    assert ([choice["text"] for choice in body["choices"]], body["usage"]["prompt_tokens"]) == (["two", "one"], 3)
    await stack.idle()


async def test_text_completions_stream_and_logprobs(stack):
    ids = stack.tokenizer.encode("Hello world!")
    stack.steps(*(Step((i,), logprobs=(-1.0,)) for i in ids), Step((END,), logprobs=(0.0,)), Step(final=True))
    body = {"model": "tiny", "prompt": "x", "logprobs": 0, "max_tokens": 30}
    whole = (await stack.client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert whole["logprobs"]["token_logprobs"] == [-1.0] * len(ids)
    assert ("".join(whole["logprobs"]["tokens"]), whole["logprobs"]["text_offset"][0]) == ("Hello world!", 0)
    *events, done = await stack.events(COMPLETIONS, **body)
    assert ("".join(event["choices"][0]["text"] for event in events), done) == ("Hello world!", "[DONE]")


async def test_special_tokens_stay_when_wanted(stack):
    stack.steps(Step((*stack.tokenizer.encode("a"), END, *stack.tokenizer.encode("b"))), Step(final=True))
    choice = (await stack.chat(skip_special_tokens=False, ignore_eos=True)).json()["choices"][0]
    assert choice["message"]["content"] == "a<|end|>b"


async def test_misspelt_fields_are_named_to_the_client_and_logged_once(stack, caplog, monkeypatch):
    monkeypatch.setattr(ignored_fields, "_logged", set())
    for _ in range(2):
        stack.say("Hello")
        answer = await stack.chat(max_token=5, temprature=0.5, zzz=1)
        assert answer.status_code == 200
        assert answer.headers["x-llmops-warnings"] == (
            "The field 'max_token' is unknown and was ignored; did you mean 'max_tokens'? "
            "The field 'temprature' is unknown and was ignored; did you mean 'temperature'? "
            "The field 'zzz' is unknown and was ignored."
        )
        assert not answer.json().keys() & {"warnings", "max_token"}
    logged = [record.getMessage() for record in caplog.records if "is unknown" in record.getMessage()]
    assert [line.partition("the field ")[2].split()[0] for line in logged] == ["max_token", "temprature", "zzz"]
    assert "x-llmops-warnings" not in (await stack.chat()).headers


async def test_warnings_are_a_header_whatever_a_client_calls_its_fields(stack):
    stack.say("Hello")
    answer = await stack.chat(**{"näme\r\nx-evil: 1": 1, "ö": 1, **{"x" * 60 + str(one): 1 for one in range(40)}})
    assert "x-evil" not in answer.headers
    assert "The field '?' is unknown" in answer.headers["x-llmops-warnings"]
    assert len(answer.headers["x-llmops-warnings"]) <= 1500


async def test_unknown_fields_are_refused_when_the_settings_say_so(card, tokenizer):
    async with running(card, tokenizer, strict_fields=True) as stack:
        refused = await stack.chat(temprature=0.5)
        assert refused.status_code == 400
        assert refused.json()["error"] == {
            "message": "Unknown field 'temprature'; did you mean 'temperature'?",
            "type": "invalid_request_error", "param": "temprature", "code": "unknown_parameter",
        }  # fmt: skip
        stack.say("Hello")
        assert (await stack.chat(store=True)).status_code == 200


async def test_metrics_count_requests_and_tokens(stack):
    ids = stack.say("Hello world!")
    await stack.events()
    await stack.chat(model="nope")
    metrics = (await stack.client.get("/metrics")).text
    for sample in (
        'llmops_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'llmops_requests_total{route="/v1/chat/completions",status="404"} 1.0',
        f'llmops_completion_tokens_total{{model="tiny"}} {len(ids)}.0',
        'llm_ttft_seconds_count{model="tiny"} 1.0',
        f'llmops_inter_token_latency_seconds_count{{model="tiny"}} {len(ids) - 1}.0',
        'llmops_active_streams{model="tiny"} 0.0',
    ):
        assert sample in metrics


STAGES = ("parse", "queue", "template", "tokenise", "submit", "upstream", "detokenise", "write")


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_stages_of_a_request_are_measured(stack, streamed):
    stack.say("Hello world!", wait=0.05)
    await (stack.events() if streamed else stack.chat())
    metrics = (await stack.client.get("/metrics")).text
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in metrics.splitlines() if line[0] != "#"}
    assert [values[f'llmops_stage_seconds_count{{stage="{stage}"}}'] for stage in STAGES] == [1.0] * len(STAGES)
    seconds = {stage: values[f'llmops_stage_seconds_sum{{stage="{stage}"}}'] for stage in STAGES}
    assert seconds["upstream"] > 0.05
    assert min(seconds.values()) > 0
    own = sum(seconds.values()) - seconds["upstream"]
    assert own == pytest.approx(values['llmops_overhead_seconds_sum{stage="total"}'])
