"""Runs LangChain against a gateway: python frameworks.py BASE_URL MODEL ENCODER.

Prints {check: "ok" | what went wrong}. Lives in an environment of its own, so it uses nothing of the tests'.
"""

import asyncio
import json
import sys
import traceback

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

BASE_URL, MODEL, ENCODER = sys.argv[1:4]
QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)
    capital: bool


def get_weather(city: str) -> str:
    """Weather of a city."""
    return "sunny"


def langchain(**options):
    settings = {"temperature": 0, "max_tokens": 40, "max_retries": 0, **options}
    return ChatOpenAI(base_url=BASE_URL, api_key="test", model=MODEL, **settings)


def langchain_chat():
    answer = langchain().invoke(QUESTION)
    assert "Paris" in answer.content, answer
    assert answer.usage_metadata["output_tokens"] > 0


def langchain_stream():
    assert "Paris" in "".join(chunk.content for chunk in langchain().stream(QUESTION))


def langchain_async_stream():
    async def collect():
        return "".join([chunk.content async for chunk in langchain().astream(QUESTION)])

    assert "Paris" in asyncio.run(collect())


def langchain_stop():
    assert "Paris" not in langchain(stop=["Paris"]).invoke(QUESTION).content


def langchain_tools():
    model = langchain(max_tokens=80)
    question = HumanMessage("Weather in Paris?")
    answer = model.bind_tools([get_weather], tool_choice="required").invoke([question])
    call = answer.tool_calls[0]
    assert call["name"] == "get_weather", answer
    assert isinstance(call["args"]["city"], str)
    history = [question, answer, *(ToolMessage("sunny", tool_call_id=one["id"]) for one in answer.tool_calls)]
    assert model.invoke(history).content


def langchain_streamed_tools():
    model = langchain(max_tokens=80).bind_tools([get_weather], tool_choice="get_weather")
    whole = None
    for chunk in model.stream("Weather in Paris?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["name"] == "get_weather", whole


def langchain_structured():
    for method in ("json_schema", "function_calling"):
        answer = langchain(max_tokens=80).with_structured_output(City, method=method).invoke(QUESTION)
        assert isinstance(answer, City), (method, answer)


def langchain_responses():
    answer = langchain(use_responses_api=True, output_version="responses/v1").invoke(QUESTION)
    assert "Paris" in str(answer.content), answer


def langchain_embeddings():
    # its default cuts texts into tokens of OpenAI's own models
    model = OpenAIEmbeddings(base_url=BASE_URL, api_key="test", model=ENCODER, check_embedding_ctx_length=False)
    query, texts = model.embed_query("capital of France"), model.embed_documents(["Paris", "a recipe for soup"])
    near, far = (sum(a * b for a, b in zip(query, text, strict=True)) for text in texts)
    assert near > far + 0.1, (near, far)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("langchain_")]


def outcome(check):
    try:
        check()
    except Exception:
        return traceback.format_exc()[-2000:]
    return "ok"


print(json.dumps({check.__name__: outcome(check) for check in CHECKS}))
