"""/tokenize and /detokenize, and what the model list tells."""

from tests.support.gateway_stack import running


async def test_a_prompt_there_and_back(stack):
    text = "Hello world! 你好 🙂"
    body = {"model": "tiny", "prompt": text, "return_token_strs": True}
    told = (await stack.client.post("/tokenize", json=body)).json()
    ids = stack.tokenizer.encode(text)
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), 256)
    assert told["token_strs"] == [stack.tokenizer.token(i) for i in ids]
    assert (await stack.client.post("/detokenize", json={"model": "tiny", "tokens": ids})).json() == {"prompt": text}


async def test_messages_count_what_a_chat_would_use(stack):
    stack.say("Hello")
    told = (await stack.client.post("/tokenize", json=stack.chat_body)).json()
    assert told["count"] == (await stack.chat()).json()["usage"]["prompt_tokens"]
    assert told["tokens"] == stack.triton.requests[-1]["input_ids"]


async def test_the_text_of_tokens_has_at_most_the_characters_of_a_prompt(card, tokenizer):
    """Before, 97 KB of ids of a token of 20,000 characters took 1.4 GB."""
    (token,) = tokenizer.encode("Hello")
    async with running(card, tokenizer, limits={"prompt_bytes": 100}) as stack:
        for count, status in ((20, 200), (21, 400)):
            answer = await stack.client.post("/detokenize", json={"model": "tiny", "tokens": [token] * count})
            assert answer.status_code == status
    assert "105 characters" in answer.json()["error"]["message"]


async def test_bad_token_requests(stack):
    both = await stack.client.post("/tokenize", json={**stack.chat_body, "prompt": "x"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt")
    negative = await stack.client.post("/detokenize", json={"model": "tiny", "tokens": [1, -1]})
    assert (negative.status_code, negative.json()["error"]["param"]) == (400, "tokens[1]")
    missing = await stack.client.post("/detokenize", json={"model": "tiny", "tokens": [1, 10**7]})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "tokens")
    assert (await stack.client.post("/tokenize", json={"model": "nope", "prompt": "x"})).status_code == 404
