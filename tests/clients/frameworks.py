"""Runs LangChain and LlamaIndex against a gateway: python frameworks.py BASE_URL MODEL ENCODER.

Prints {check: "ok" | what went wrong}. Lives in an environment of its own, so it uses nothing of the tests'.
"""

import asyncio
import gc
import json
import sys
import time
import traceback
import urllib.request

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
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


def llama_index(**options):
    settings = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 40, "max_retries": 0, **options}
    return OpenAILike(api_base=BASE_URL, api_key="test", model=MODEL, temperature=0.0, **settings)


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


def llama_index_chat():
    answer = llama_index().chat([ChatMessage(role="user", content=QUESTION)])
    assert "Paris" in answer.message.content


def llama_index_stream():
    deltas = [one.delta for one in llama_index().stream_chat([ChatMessage(role="user", content=QUESTION)])]
    assert "Paris" in "".join(delta or "" for delta in deltas)


def llama_index_complete():
    model = llama_index(is_chat_model=False)
    assert model.complete("The capital of France is").text
    assert "".join(one.delta or "" for one in model.stream_complete("The capital of France is"))


def llama_index_tools():
    tools = [FunctionTool.from_defaults(get_weather)]
    model = llama_index(max_tokens=80)
    answer = model.chat_with_tools(tools, user_msg="Weather in Paris?", tool_required=True)
    call = model.get_tool_calls_from_response(answer)[0]
    assert call.tool_name == "get_weather"
    assert isinstance(call.tool_kwargs["city"], str)


def langchain_async_chat():
    assert "Paris" in asyncio.run(langchain().ainvoke(QUESTION)).content


def langchain_abort():
    stream = langchain(max_tokens=4000, extra_body={"ignore_eos": True}).stream(QUESTION)
    next(stream)
    stream.close()
    becomes_idle()


def langchain_embeddings():
    # its default cuts texts into tokens of OpenAI's own models
    model = OpenAIEmbeddings(base_url=BASE_URL, api_key="test", model=ENCODER, check_embedding_ctx_length=False)
    near_and_far(model.embed_query("capital of France"), *model.embed_documents(["Paris", "a recipe for soup"]))


def llama_index_async():
    async def both():
        question = [ChatMessage(role="user", content=QUESTION)]
        whole = await llama_index().achat(question)
        deltas = [one.delta or "" async for one in await llama_index().astream_chat(question)]
        return whole.message.content, "".join(deltas)

    whole, streamed = asyncio.run(both())
    assert "Paris" in whole
    assert streamed == whole


def llama_index_streamed_tools():
    tools = [FunctionTool.from_defaults(get_weather)]
    model = llama_index(max_tokens=80)
    *_, last = model.stream_chat_with_tools(tools, user_msg="Weather in Paris?", tool_required=True)
    assert model.get_tool_calls_from_response(last)[0].tool_name == "get_weather"


def llama_index_structured():
    answer = llama_index(max_tokens=80).structured_predict(City, PromptTemplate(QUESTION))
    assert isinstance(answer, City), answer


def llama_index_abort():
    question = [ChatMessage(role="user", content=QUESTION)]
    stream = llama_index(max_tokens=4000, additional_kwargs={"extra_body": {"ignore_eos": True}}).stream_chat(question)
    next(stream)
    stream.close()
    # its generators hold the HTTP response in a cycle, and close nothing themselves
    del stream
    gc.collect()
    becomes_idle()


def llama_index_embeddings():
    model = OpenAILikeEmbedding(model_name=ENCODER, api_base=BASE_URL, api_key="test")
    texts = model.get_text_embedding_batch(["Paris", "a recipe for soup"])
    near_and_far(model.get_query_embedding("capital of France"), *texts)
    assert len(asyncio.run(model.aget_text_embedding("Paris"))) == len(texts[0])


def near_and_far(query, near, far):
    def likeness(vector):
        return sum(a * b for a, b in zip(query, vector, strict=True))

    assert likeness(near) > likeness(far) + 0.1, (likeness(near), likeness(far))


def becomes_idle():
    """Leaving a stream frees the engine."""
    deadline = time.monotonic() + 90
    while active() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert active() == 0


def active():
    with urllib.request.urlopen(BASE_URL.removesuffix("/v1") + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("llmops_active_streams{"))


CHECKS = [value for name, value in list(globals().items()) if name.startswith(("langchain_", "llama_index_"))]


def outcome(check):
    try:
        check()
    except Exception:
        return traceback.format_exc()[-2000:]
    return "ok"


print(json.dumps({check.__name__: outcome(check) for check in CHECKS}))
