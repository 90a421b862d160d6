"""Bad requests: the status, OpenAI's envelope, the field's name."""

import json

import pytest

from llmops.contract import GUIDE_KINDS
from tests.support.gateway_stack import BODIES, CHAT, COMPLETIONS, running
from tests.support.scripted_triton import Step

TOLD = {"role": "tool", "content": "18 degrees"}
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}


async def test_refused_with_its_param(stack):
    for fields, param, code in [
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": 3}, "temperature", "invalid_value"), ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"), ({"stream": 1}, "stream", "invalid_type"),
        ({"n": 0}, "n", "invalid_value"), ({"n": 5}, "n", "unsupported_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"), ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 10_000}, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": 10_000}, "max_completion_tokens", "context_length_exceeded"),
        ({"messages": []}, "messages", "invalid_value"), ({"messages": None}, "messages", "invalid_type"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [TOLD]}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"messages": [IMAGE]}, "messages[0].content[0]", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "x" * 4000}]}, "messages", "context_length_exceeded"),
        ({"stop": [""]}, "stop", None), ({"stop": ["x"] * 17}, "stop", None),
        ({"stop": [1]}, "stop[0]", "invalid_type"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
        ({"top_logprobs": 3}, "top_logprobs", None), ({"min_p": 0.1}, "min_p", "unsupported_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"functions": [{"name": "f"}]}, "functions", None),
        ({"tools": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(129)]}, "tools", None),
        ({"modalities": ["text", "audio"]}, "modalities", None),
        ({"web_search_options": {}}, "web_search_options", None), ({"seed": 2**70}, "seed", None),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "unsupported_parameter"),
    ]:  # fmt: skip
        response = await stack.chat(**fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"]
        if code is not None:
            assert error["code"] == code
        assert stack.triton.requests == [], "nothing reaches the engine"


async def test_numbers_that_json_does_not_have(stack):
    for number in ["NaN", "Infinity", "-Infinity", "1e999", "-1E+400", "9" * 400 + ".0", "9" * 5000]:
        for path in ["/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"]:
            needed = {"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "model": "tiny"}
            body = json.dumps({**needed, "metadata": {"a": [0]}})
            response = await stack.client.post(path, content=body.replace("[0]", f"[{number}]"))
            assert response.status_code == 400, response.text
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_every_error_says_whether_to_try_again(stack):
    assert (await stack.chat(temperature=3)).headers["x-should-retry"] == "false"
    missing = await stack.client.get("/nope")
    assert missing.headers["x-should-retry"] == "false"
    assert int(missing.headers["openai-processing-ms"]) >= 0
    stack.steps(Step(error="the engine broke", final=True))
    broken = await stack.chat()
    assert (broken.status_code, broken.headers["x-should-retry"]) == (500, "true")


async def test_a_wrong_base_url_or_a_misspelt_path_gets_the_path_that_was_meant(stack):
    openai = "The base URL of OpenAI's clients ends in /v1, without a slash."
    anthropic = "The base URL of Anthropic's clients has no /v1 and no slash at its end."
    for path, hint in [
        ("/v1/v1/chat/completions", f"Did you mean /v1/chat/completions? {openai}"),
        ("/chat/completions", f"Did you mean /v1/chat/completions? {openai}"),
        ("/v1/chat/completions/", f"Did you mean /v1/chat/completions? {openai}"),
        ("/embeddings/", f"Did you mean /v1/embeddings? {openai}"),
        ("/v1/v1/messages", f"Did you mean /v1/messages? {anthropic}"),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/v1/nothing", "GET /docs shows the endpoints."),
        ("/v1/moderations", "This gateway has no safety filters. Its operator can add some (docs/safety.md)."),
        ("/api/usage", "It belongs to `llmops control`: start that, or `llmops up`, with a store (--store URL)."),
    ]:
        answer = await stack.client.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, f"There is no POST {path}. {hint}")


async def test_ignored_fields_are_named_and_counted_everywhere(stack):
    stack.say("Hello")
    extra = {"priority": 3, "what": 1, "stream": True, "stream_options": {"include_obfuscation": False}}
    for path in (CHAT, COMPLETIONS):
        answer = await stack.client.post(path, json={**BODIES[path], **extra})
        assert answer.headers["x-llmops-ignored"] == "priority, stream_options.include_obfuscation, what"
    fields = {"what": 1, "reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}, "service_tier": "flex"}
    response = await stack.client.post("/v1/responses", json={"model": "tiny", "input": "x", **fields})
    assert response.headers["x-llmops-ignored"] == "service_tier, reasoning.summary, text.verbosity, what"
    metrics = (await stack.client.get("/metrics")).text
    assert 'llmops_ignored_fields_total{field="priority"} 2.0' in metrics
    assert 'llmops_ignored_fields_total{field="unknown"} 3.0' in metrics
    assert 'llmops_ignored_fields_total{field="text.verbosity"} 1.0' in metrics


async def test_null_is_tolerated(stack):
    stack.say("Hello")
    fields = dict.fromkeys(["temperature", "stop", "n", "tools", "stream", "stream_options", "foo"])
    assert (await stack.chat(**fields)).status_code == 200


async def test_malformed_bodies(stack):
    for body in [b"", b"{", b"[]", b"null", b'"x"', b'{"messages": NaN}', b"\xff\xfe", b"[" * 5000]:
        response = await stack.client.post(CHAT, content=body)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_unknown_models_routes_and_methods(stack):
    response = await stack.chat(model="gpt-9")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert (await stack.client.get("/v1/models/gpt-9")).status_code == 404
    missing = await stack.client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await stack.client.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]
    assert wrong.headers["x-request-id"]
    several = await stack.client.put("/api/conversations")
    assert several.headers["allow"] == "DELETE, GET, POST"
    assert several.json()["error"]["message"].endswith("use DELETE or GET or POST.")


async def test_body_over_the_limit(card, tokenizer):
    async with running(card, tokenizer, limits={"body_bytes": 1000}) as stack:
        announced = await stack.client.post(CHAT, content=b"x" * 1001)
        assert (announced.status_code, announced.json()["error"]["code"]) == (413, "request_too_large")

        async def chunks():
            for _ in range(20):
                yield b"x" * 100

        assert (await stack.client.post(CHAT, content=chunks())).status_code == 413


async def test_a_refusal_of_the_engine_names_the_clients_field(stack):
    stack.steps(Step(error="guided_decoding_guide: schema is not supported", final=True))
    response = await stack.chat()
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


async def test_request_ids(stack):
    stack.say("Hello")
    kept = await stack.client.post(CHAT, json=stack.chat_body, headers={"x-request-id": "abc-123"})
    assert kept.headers["x-request-id"] == "abc-123"
    replaced = await stack.client.post(CHAT, json=stack.chat_body, headers={"x-request-id": "a b" * 100})
    assert replaced.headers["x-request-id"].startswith("req_")


async def test_a_bias_that_cannot_be(card, tokenizer):
    card["capabilities"]["logit_bias"] = True
    async with running(card, tokenizer) as stack:
        for bias in ({"-1": 1}, {"1000000": 1}, {"x": 1}, {"1": "1"}, {"1": 101}, {"1": True}):
            response = await stack.chat(logit_bias=bias)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")


async def test_a_field_of_another_target_names_that_target(stack):
    for fields in ({"logit_bias": {"5": 1}}, {"bad_words": ["x"]}):
        message = (await stack.chat(**fields)).json()["error"]["message"]
        assert message.endswith("An engine of target tensorrt on NVIDIA's backend takes it."), message


@pytest.mark.parametrize(("field", "value"), [("min_tokens", 3), ("ignore_eos", True)])
async def test_nvidias_backend_gets_no_grammar_for_an_answer_that_goes_on_after_it(card, tokenizer, field, value):
    """Its executor asks xgrammar for a mask then, which throws, and a step's error ends all requests (1.2.1
    cpp/tensorrt_llm/batch_manager/guidedDecoder.cpp, build; executor/executorImpl.cpp, terminateActiveRequests).
    """
    card["capabilities"]["guided"] = list(GUIDE_KINDS)
    async with running({**card, "target": "tensorrt", "transports": ["request"]}, tokenizer) as stack:
        for guide in ({"response_format": {"type": "json_object"}}, {}):
            response = await stack.chat(**{field: value}, **guide)
            assert response.status_code == (400 if guide else 200)
            assert not guide or response.json()["error"]["param"] == field
        body = {"model": "tiny", "prompt": "a", field: value, "guided_regex": "a"}
        response = await stack.client.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(("ends", "bans", "status"), [([2], False, 200), ([2, 3], True, 200), ([2, 3], False, 400)])
async def test_min_tokens_where_nvidias_backend_bans_no_words(card, tokenizer, ends, bans, status):
    """Its minimum-length penalty masks END_ID alone, and with lookahead decoding it has no banned words (1.2.1
    cpp/include/tensorrt_llm/executor/types.h, DecodingMode::Lookahead): an answer would run past the other ends.
    """
    able = {**card, "target": "tensorrt", "transports": ["request"], "end_ids": ends}
    able["capabilities"] = {**card["capabilities"], "bad_words": bans, "logit_bias": False}
    async with running(able, tokenizer) as stack:
        response = await stack.chat(min_tokens=5)
        assert response.status_code == status
        if status == 400:
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("min_tokens", "unsupported_parameter")
        message = (await stack.chat(logit_bias={"5": 1})).json()["error"]["message"]
        assert message == "logit_bias is not supported by this model (target tensorrt)."
