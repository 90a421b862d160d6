"""openai-python, sync and async, against the real stack."""

import asyncio
import base64
import json
import time

import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
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


def test_chat(client):
    answer = ask(client)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = ask(client)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


async def test_async_stream(base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="test", max_retries=0) as client:
        stream = await ask(client, stream=True)
        assert "Paris" in "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@pytest.fixture
async def async_client(base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="test", max_retries=0) as client:
        yield client


async def test_async_parse_tools_and_helpers(async_client):
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 80, "temperature": 0}
    parsed = await async_client.chat.completions.parse(**asked, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    tools = [openai.pydantic_function_tool(City, name="capital")]
    called = await async_client.chat.completions.parse(**asked, tools=tools, tool_choice="required")
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, City)
    async with async_client.chat.completions.stream(**asked, tools=tools, tool_choice="required") as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, City)


async def test_async_abort_frees_the_engine(async_client, base_url):
    stream = await ask(async_client, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    await anext(aiter(stream))
    await stream.close()
    deadline = time.monotonic() + 90
    while active(base_url) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert active(base_url) == 0


async def test_async_responses(async_client):
    asked = {"model": "smollm2", "input": "Is Paris a capital?", "temperature": 0, "max_output_tokens": 80}
    parsed = await async_client.responses.parse(**asked, text_format=City)
    assert isinstance(parsed.output_parsed, City)
    async with async_client.responses.stream(**asked) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text
    items = await async_client.responses.input_items.list(final.id)
    assert [item.role async for item in items] == ["user"]


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


def test_echo_and_best_of(client):
    asked = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == asked["prompt"] + plain
    several = client.completions.create(**{**asked, "temperature": 1.5}, n=2, best_of=4, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1]
    guided = client.completions.create(**asked, extra_body={"guided_regex": " (Lyon|Paris)"}).choices[0].text
    assert guided in (" Lyon", " Paris")


def test_parse(client):
    answer = client.chat.completions.parse(
        model="smollm2", messages=QUESTION, response_format=City, max_tokens=80, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_stream_helper_with_structured_output(client):
    with client.chat.completions.stream(
        model="smollm2", messages=QUESTION, response_format=City, max_tokens=80, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_forced_calls(client, choice, reason):
    answer = ask(client, tools=[WEATHER, NOW], tool_choice=choice, max_tokens=120).choices[0]
    assert answer.finish_reason == reason
    assert answer.message.content is None
    for call in answer.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert (set(arguments) == {"city", "unit"}) if call.function.name == "get_weather" else arguments == {}


def test_forced_call_streams(client):
    deltas = [
        call
        for chunk in ask(client, tools=[WEATHER], tool_choice="required", stream=True, max_tokens=120)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert (deltas[0].function.name, deltas[0].type, bool(deltas[0].id)) == ("get_weather", "function", True)
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:] if delta.index == 0)
    assert len(deltas) > 5
    first = "".join(delta.function.arguments for delta in deltas if delta.index == 0)
    assert set(json.loads(first)) == {"city", "unit"}


def test_tool_history(client):
    call = ask(client, tools=[WEATHER], tool_choice="required", max_tokens=120).choices[0].message
    results = [{"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in call.tool_calls]
    answer = ask(client, messages=[*QUESTION, call, *results], tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content


def test_guides(client):
    assert ask(client, extra_body={"guided_choice": ["Lyon", "Paris"]}).choices[0].message.content in ("Lyon", "Paris")
    assert ask(client, extra_body={"guided_regex": "[A-F]{4}"}).choices[0].message.content.strip("ABCDEF") == ""
    whole = ask(client, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(whole.message.content), dict)


def test_abort_frees_the_engine(client, base_url):
    stream = ask(client, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert active(base_url) == 1
    stream.close()
    deadline = time.monotonic() + 90
    while active(base_url) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert active(base_url) == 0


def active(base_url):
    text = httpx.get(base_url.removesuffix("/v1") + "/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith('llmops_active_streams{model="smollm2"')]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
    ],
)
def test_errors_name_the_field(client, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **options)
    assert refused.value.param == param


# -- responses -------------------------------------------------------------------------------------------------------


def respond(client, **options):
    settings = {
        "model": "smollm2",
        "input": QUESTION[0]["content"],
        "max_output_tokens": 40,
        "temperature": 0,
        **options,
    }
    return client.responses.create(**settings)


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
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    done = events[-1].response
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == done.output_text == client.responses.retrieve(done.id).output_text


def test_response_helpers(client):
    with client.responses.stream(
        model="smollm2", input="Is Paris a capital?", text_format=City, temperature=0, max_output_tokens=80
    ) as stream:
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
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    outputs = [{"type": "function_call_output", "call_id": one.call_id, "output": "sunny"} for one in first.output]
    again = respond(client, input=outputs, previous_response_id=first.id, tools=[tool], tool_choice="none")
    assert again.output_text


def test_background_and_cancel(client, base_url):
    running = respond(client, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    assert client.responses.retrieve(running.id).status == "in_progress"
    assert client.responses.cancel(running.id).status == "cancelled"
    assert client.responses.retrieve(running.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(running.id)


def test_another_key_sees_nothing(client, base_url):
    mine = respond(client)
    with openai.OpenAI(base_url=base_url, api_key="other", max_retries=0) as other, pytest.raises(openai.NotFoundError):
        other.responses.retrieve(mine.id)


# -- embeddings ------------------------------------------------------------------------------------------------------

TEXTS = ["Paris is the capital of France.", "", "Müller 🦙 東京 " * 10]


def test_embeddings_equal_the_reference(client):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from llmops.build.encoder import open_encoder

    path = open_encoder("minilm").path
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(path), transformers.BertModel.from_pretrained(path)
    with torch.no_grad():
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
        means = torch.cat([model.eval()(one).last_hidden_state.mean(dim=1) for one in ids])
    expected = torch.nn.functional.normalize(means, dim=1).numpy()
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    assert abs(np.array([entry.embedding for entry in answer.data]) - expected).max() < 1e-4
    assert answer.usage.prompt_tokens == sum(one.shape[1] for one in ids)


def test_embedding_forms(client, base_url):
    def post(**body):
        return httpx.post(base_url + "/embeddings", json={"model": "minilm", **body}, timeout=60).json()["data"][0][
            "embedding"
        ]

    plain = np.array(post(input=TEXTS[0]))
    raw = base64.b64decode(post(input=TEXTS[:1], encoding_format="base64"))
    assert (np.frombuffer(raw, "<f4") == plain.astype("f4")).all()
    short = np.array(client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=64).data[0].embedding)
    assert np.allclose(short, plain[:64] / np.linalg.norm(plain[:64]), atol=1e-6)
    assert np.allclose(post(input=[[101, 102], [101, 3000, 102]]), post(input=""), atol=1e-6)


async def test_many_embeddings_at_once(base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="test", max_retries=0) as client:
        lists = [[f"text {i} " * (i % 9 + 1) for i in range(k, k + 40)] for k in range(6)]
        answers = await asyncio.gather(*(client.embeddings.create(model="minilm", input=texts) for texts in lists))
        alone = await client.embeddings.create(model="minilm", input=lists[3][17])
    assert np.allclose(answers[3].data[17].embedding, alone.data[0].embedding, atol=1e-5)
    assert [entry.index for entry in answers[5].data] == list(range(40))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "word " * 400}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [10**6]}, "input[0]"),
        ({"input": "x", "dimensions": 385}, "dimensions"),
        ({"input": {"a": 1}}, "input"),
    ],
)
def test_embedding_errors(base_url, body, param):
    answer = httpx.post(base_url + "/embeddings", json={"model": "minilm", **body}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_truncation_is_asked_for(base_url):
    body = {"model": "minilm", "input": "word " * 400, "truncate_prompt_tokens": -1}
    assert httpx.post(base_url + "/embeddings", json=body, timeout=60).json()["usage"]["prompt_tokens"] == 256


def test_the_model_list_says_what_is_ready(client):
    models = {model.id: model.model_extra for model in client.models.list()}
    assert {name: extra["ready"] for name, extra in models.items()} == {"smollm2": True, "minilm": True}
    assert models["minilm"]["capabilities"]["embeddings"] is True
    assert client.models.retrieve("minilm").model_extra == models["minilm"]
