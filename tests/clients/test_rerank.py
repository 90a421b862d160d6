"""/v1/rerank over the bundled embedder, asked by Cohere's own SDK and in the forms of Jina and vLLM."""

import httpx
import numpy as np
import pytest

cohere = pytest.importorskip("cohere")

QUERY = "What is the capital of France?"
DOCUMENTS = ["Bananas are rich in potassium.", "Paris is the capital of France."]
DOCUMENTS += ["The capital of Brazil is Brasília.", "", "France borders Spain, Italy and Germany. " * 80]


@pytest.fixture
def root(base_url):
    return base_url.removesuffix("/v1")


def post(root, path="/v1/rerank", **fields):
    body = {"model": "minilm", "query": QUERY, "documents": DOCUMENTS, **fields}
    return httpx.post(root + path, json=body, timeout=60)


@pytest.fixture(scope="module")
def cosines():
    """Return the scores of transformers' own BERT, mean-pooled.

    Documents are cut to the context of 256 tokens.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from llmops.build.encoder import open_encoder

    path = open_encoder("minilm").path
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(path), transformers.BertModel.from_pretrained(path)
    texts = [QUERY, *DOCUMENTS]
    rows = [tokenizer(one, truncation=True, max_length=256, return_tensors="pt")["input_ids"] for one in texts]
    with torch.no_grad():
        means = torch.cat([model.eval()(row).last_hidden_state.mean(dim=1) for row in rows])
    vectors = torch.nn.functional.normalize(means, dim=1).numpy()
    return vectors[1:] @ vectors[0], sum(row.shape[1] for row in rows)


def test_scores_are_the_cosines_of_the_reference(root, cosines):
    expected, tokens = cosines
    answer = post(root).json()
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert abs(np.array([scores[at] for at in range(len(DOCUMENTS))]) - expected).max() < 1e-4
    assert (list(scores), next(iter(scores))) == (list(np.argsort(-expected)), 1)
    assert (answer["model"], answer["usage"]) == ("minilm", {"prompt_tokens": tokens, "total_tokens": tokens})
    assert all("document" not in result for result in answer["results"])


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cohere_s_client(root, version, cosines):
    with (cohere.Client if version == "v1" else cohere.ClientV2)(api_key="test", base_url=root) as client:
        answer = client.rerank(model="minilm", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [result.index for result in answer.results] == list(np.argsort(-cosines[0])[:2])
    assert abs(answer.results[0].relevance_score - cosines[0].max()) < 1e-4
    assert answer.id.startswith("rerank-")
    assert (answer.meta.billed_units.input_tokens, answer.meta.tokens.output_tokens) == (cosines[1], 0)


def test_cohere_s_documents_as_objects(root):
    documents = [{"text": one, "title": "ignored"} for one in DOCUMENTS[:3]]
    with cohere.Client(api_key="test", base_url=root) as client:
        answer = client.rerank(model="minilm", query=QUERY, documents=documents, return_documents=True)
    assert answer.results[0].document.text == DOCUMENTS[1]
    assert {result.index: result.document.text for result in answer.results} == dict(enumerate(DOCUMENTS[:3]))


def test_cohere_s_client_raises_what_went_wrong(root):
    from cohere.errors import BadRequestError, NotFoundError

    with cohere.ClientV2(api_key="test", base_url=root) as client:
        with pytest.raises(NotFoundError) as missing:
            client.rerank(model="smollm2", query=QUERY, documents=DOCUMENTS)
        assert missing.value.body["error"]["code"] == "model_not_found"
        with pytest.raises(BadRequestError):
            client.rerank(model="minilm", query=QUERY, documents=[])


def test_the_three_paths_are_one(root):
    answers = [post(root, path).json()["results"] for path in ("/v1/rerank", "/v2/rerank", "/rerank")]
    assert answers[0] == answers[1] == answers[2]


def test_documents_are_cut_where_they_are_asked_to_be(root):
    # [CLS] and [SEP] around the query and each document; at most two tokens of each
    from llmops.build.encoder import open_encoder
    from llmops.gateway.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(open_encoder("minilm").path)
    expected = len(tokenizer.encode(QUERY)) + sum(2 for one in DOCUMENTS if one) + 2 * len(DOCUMENTS)
    assert post(root, max_tokens_per_doc=2).json()["usage"]["total_tokens"] == expected
    one_word = post(root, max_tokens_per_doc=2, documents=["Paris is far away", "Paris is"]).json()["results"]
    assert one_word[0]["relevance_score"] == pytest.approx(one_word[1]["relevance_score"], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"documents": []}, "documents", "invalid_value"),
        ({"documents": "text"}, "documents", "invalid_type"),
        ({"documents": ["a", 5]}, "documents[1]", "invalid_type"),
        ({"documents": [{"title": "a"}]}, "documents[0].text", None),
        ({"documents": ["a"] * 2049}, "documents", None),
        ({"documents": ["x" * 1_100_000] * 4}, "documents", "context_length_exceeded"),
        ({"top_n": 0}, "top_n", "invalid_value"),
        ({"top_n": "3"}, "top_n", "invalid_type"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", "invalid_value"),
        ({"query": ""}, "query", "invalid_value"),
        ({"query": ["a"]}, "query", "invalid_type"),
        ({"query": "word " * 400}, "query", "context_length_exceeded"),
        ({"query": "word " * 100_000}, "query", "context_length_exceeded"),
    ],
)
def test_refused_with_its_param(root, fields, param, code):
    answer = post(root, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert code is None or error["code"] == code
