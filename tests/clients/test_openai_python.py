"""openai-python, sync and async, against the real stack."""

import base64
import json

import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.waiting import wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PLACE = {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}}
PARAMETERS = {"type": "object", "properties": PLACE, "required": [*PLACE], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


class City(BaseModel):
    city: str = Field(max_length=20)
    capital: bool


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="test", max_retries=0) as client:
        yield client


def ask(client, **options):
    settings = {"model": "smollm2", "messages": QUESTION, "max_tokens": 40, "temperature": 0, **options}
    return client.chat.completions.create(**settings)


def test_a_stream_says_the_same(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = ask(client)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert chunks[-1].usage == whole.usage
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


async def test_async_stream(base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="test", max_retries=0) as client:
        stream = await ask(client, stream=True)
        assert "Paris" in "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_a_background_stream_is_taken_up_again(client):
    stream = respond(client, background=True, stream=True)
    seen = [next(stream) for _ in range(5)]
    stream.close()
    name = seen[0].response.id
    seen += client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == client.responses.retrieve(name).output_text == respond(client).output_text
    assert list(client.responses.retrieve(name, stream=True)) == seen


CHOSEN = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (CHOSEN, "stop")])
def test_forced_calls(client, choice, reason):
    answer = ask(client, tools=[WEATHER, NOW], tool_choice=choice, max_tokens=120).choices[0]
    assert answer.finish_reason == reason
    assert answer.message.content is None
    for call in answer.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert (set(arguments) == {"city", "unit"}) if call.function.name == "get_weather" else arguments == {}


def test_tool_history(client):
    call = ask(client, tools=[WEATHER], tool_choice="required", max_tokens=120).choices[0].message
    results = [{"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in call.tool_calls]
    answer = ask(client, messages=[*QUESTION, call, *results], tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content


def test_abort_frees_the_engine(client, base_url):
    stream = ask(client, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert active(base_url) == 1
    stream.close()
    wait_until(lambda: active(base_url) == 0)


def active(base_url):
    text = httpx.get(base_url.removesuffix("/v1") + "/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith('llmops_active_streams{model="smollm2"')]
    return sum(float(line.split()[-1]) for line in lines)


def test_errors_name_the_field(client):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, response_format={"type": "json_schema"})
    assert refused.value.param == "response_format.json_schema.schema"


# -- responses -------------------------------------------------------------------------------------------------------


def respond(client, **options):
    settings = {"model": "smollm2", "max_output_tokens": 40, "temperature": 0, **options}
    return client.responses.create(**{"input": QUESTION[0]["content"], **settings})


def test_response(client):
    answer = respond(client, instructions="Answer briefly.")
    messages = [{"role": "system", "content": "Answer briefly."}, *QUESTION]
    chat = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=40, temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert client.responses.retrieve(answer.id).output_text == answer.output_text


def test_response_events(client):
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = ("created", "in_progress", "output_item.added", "content_part.added")
    assert [event.type for event in events[:4]] == [f"response.{kind}" for kind in kinds]
    done = events[-1].response
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == done.output_text == client.responses.retrieve(done.id).output_text


def test_response_helpers(client):
    asked = {"model": "smollm2", "input": "Is Paris a capital?", "temperature": 0, "max_output_tokens": 80}
    with client.responses.stream(**asked, text_format=City) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_conversation_goes_on(client):
    first = respond(client)
    second = respond(client, input="And of Italy?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        respond(client, input="And of Spain?", previous_response_id=second.id)
    assert gone.value.code == "previous_response_not_found"


def test_function_calls_in_a_response(client):
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    first = respond(client, tools=[tool], tool_choice="required", max_output_tokens=120)
    call = first.output[0]
    assert (call.type, set(json.loads(call.arguments))) == ("function_call", {"city", "unit"})
    outputs = [{"type": "function_call_output", "call_id": one.call_id, "output": "sunny"} for one in first.output]
    assert respond(client, input=outputs, previous_response_id=first.id, tools=[tool], tool_choice="none").output_text


def test_background_and_cancel(client, base_url):
    running = respond(client, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    retrieve, cancel = client.responses.retrieve, client.responses.cancel
    seen = [act(running.id).status for act in (retrieve, cancel, retrieve)]
    assert seen == ["in_progress", "cancelled", "cancelled"]
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(running.id)


def test_another_key_sees_nothing(client, base_url):
    mine = respond(client)
    with openai.OpenAI(base_url=base_url, api_key="other", max_retries=0) as other, pytest.raises(openai.NotFoundError):
        other.responses.retrieve(mine.id)


# -- embeddings ------------------------------------------------------------------------------------------------------

TEXTS = ["Paris is the capital of France.", "", "Müller 🦙 東京 " * 10]


def test_embedding_forms(client, base_url):
    def post(**body):
        answer = httpx.post(base_url + "/embeddings", json={"model": "minilm", **body}, timeout=60)
        return answer.json()["data"][0]["embedding"]

    plain = np.array(post(input=TEXTS[0]))
    raw = base64.b64decode(post(input=TEXTS[:1], encoding_format="base64"))
    assert (np.frombuffer(raw, "<f4") == plain.astype("f4")).all()
    short = np.array(client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=64).data[0].embedding)
    assert np.allclose(short, plain[:64] / np.linalg.norm(plain[:64]), atol=1e-6)
    assert np.allclose(post(input=[[101, 102], [101, 3000, 102]]), post(input=""), atol=1e-6)


def test_the_model_list_says_what_is_ready(client):
    models = {model.id: model.model_extra for model in client.models.list()}
    assert {name: extra["ready"] for name, extra in models.items()} == {"smollm2": True, "minilm": True}
    assert models["minilm"]["capabilities"]["embeddings"] is True
    assert client.models.retrieve("minilm").model_extra == models["minilm"]
