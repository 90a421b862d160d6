"""Cross-encoders: the scores of transformers' own implementation, from the graph and through Triton and /v1/rerank."""

import json

import numpy as np
import pytest

from llmops.build.encoder import open_encoder
from llmops.build.job.build_engine import build
from llmops.build.spec import BuildSpec
from llmops.errors import CheckpointError
from llmops.gateway.settings import GatewaySettings
from tests.support.gateway_stack import serving
from tests.support.stack import ready_triton
from tests.support.tokenizer_files import byte_level_tokenizer

QUERY = "the cat on the mat"
DOCUMENTS = ["a dog ran after it", "the cat sat on the mat", "", "mat " * 200, "after the dog"]
LENGTH = 48
ARCHITECTURES = ["Bert", "XLMRoberta", "Roberta"]


def tokenizer_of(folder, kind):
    """A byte-level vocabulary with the special tokens of that kind around one text and two."""
    from tokenizers import processors

    special = ["[PAD]", "[CLS]", "[SEP]"] if kind == "Bert" else ["<s>", "<pad>", "</s>"]
    tokenizer = byte_level_tokenizer([QUERY, *DOCUMENTS], 290, special)
    begin, end = ("[CLS]", "[SEP]") if kind == "Bert" else ("<s>", "</s>")
    pair = f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1" if kind == "Bert" else f"{begin}:0 $A:0 {end}:0 {end}:0 $B:0 {end}:0"
    own = [(one, tokenizer.token_to_id(one)) for one in (begin, end)]
    processor = processors.TemplateProcessing(single=f"{begin} $A {end}", pair=pair, special_tokens=own)
    tokenizer.post_processor = processor
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Random models, made by transformers: name -> (folder, model, tokenizer)."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("openvino")
    made = {}
    for seed, kind in enumerate(ARCHITECTURES):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp(kind.lower())
        bert = kind == "Bert"
        sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 48, "max_position_embeddings": LENGTH if bert else LENGTH + 2}
        own = {"type_vocab_size": 2 if bert else 1, "pad_token_id": 0 if bert else 1, "num_labels": 1}
        config = getattr(transformers, f"{kind}Config")(**sizes, **own, initializer_range=0.4)
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
        model.save_pretrained(folder)
        made[kind] = folder, model, tokenizer_of(folder, kind)
    return made


@pytest.fixture(scope="module")
def engines(checkpoints, tmp_path_factory):
    folders = {}
    for kind, (folder, _, _) in checkpoints.items():
        output = tmp_path_factory.mktemp("engines") / kind.lower()
        manifest, _ = build(BuildSpec(checkpoint=str(folder), output=output, name=kind.lower(), max_batch_size=4))
        assert (manifest.architecture, manifest.limits.max_seq_len) == (f"{kind}ForSequenceClassification", LENGTH)
        folders[kind] = output
    return folders


def pairs(tokenizer):
    """Return the pairs as transformers truncates them: only the document, at its end."""
    tokenizer.enable_truncation(LENGTH, strategy="only_second")
    return tokenizer.encode_batch([(QUERY, one) for one in DOCUMENTS])


def reference(checkpoint):
    import torch

    _, model, tokenizer = checkpoint
    with torch.no_grad():
        given = [{"input_ids": [one.ids], "token_type_ids": [one.type_ids]} for one in pairs(tokenizer)]
        rows = [model(**{name: torch.tensor(ids) for name, ids in one.items()}).logits for one in given]
    return torch.sigmoid(torch.cat(rows)).numpy()[:, 0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_graph_scores_as_transformers_does(checkpoints, engines, kind):
    import openvino as ov

    rows = pairs(checkpoints[kind][2])
    width = max(len(row.ids) for row in rows)

    def padded(of):
        return np.array([of(row) + [0] * (width - len(row.ids)) for row in rows], dtype=np.int64)

    file, options = engines[kind] / "model" / "openvino_model.xml", {"INFERENCE_PRECISION_HINT": "f32"}
    model = ov.Core().compile_model(file, "CPU", options)
    inputs = {"input_ids": padded(lambda row: row.ids), "token_type_ids": padded(lambda row: row.type_ids)}
    inputs["attention_mask"] = padded(lambda row: [1] * len(row.ids))
    expected = reference(checkpoints[kind])
    assert np.ptp(expected) > 0.05, "a test with equal scores would hold of anything"
    assert abs(model(inputs)["score"][:, 0] - expected).max() < 1e-4


@pytest.fixture(scope="module")
def triton(engines, tmp_path_factory):
    from llmops.model_repository.generate import generate_repository, read_engines

    repository = tmp_path_factory.mktemp("cross") / "repository"
    names = generate_repository(read_engines([str(engines["Bert"]), str(engines["XLMRoberta"])]), repository)
    assert names == ["bert-score", "xlmroberta-score"]
    with ready_triton(repository) as server:
        yield server


@pytest.mark.stack
@pytest.mark.xdist_group("cross-encoder")
async def test_rerank_through_triton(checkpoints, triton):
    async with serving(GatewaySettings(triton=triton.grpc_address)) as (client, _):
        for kind in ("Bert", "XLMRoberta"):
            body = {"model": kind.lower(), "query": QUERY, "documents": DOCUMENTS}
            answer = (await client.post("/v1/rerank", json=body)).json()
            expected = reference(checkpoints[kind])
            scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
            assert abs(np.array([scores[at] for at in range(len(DOCUMENTS))]) - expected).max() < 1e-4
            assert list(scores) == list(np.argsort(-expected))
            assert answer["usage"]["total_tokens"] == sum(len(one.ids) for one in pairs(checkpoints[kind][2]))

        listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
        assert listed["bert"]["capabilities"] == {"embeddings": False, "rerank": True, "chat": False}
        ready = await client.get("/health/ready?strict=true")
        assert ready.json() == {"status": "ready", "models": {"bert": {"ready": True}, "xlmroberta": {"ready": True}}}

        refused = await client.post("/v1/embeddings", json={"model": "bert", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        # as long as the context: nothing is left for a document
        long = {"model": "bert", "query": "mat " * LENGTH, "documents": ["x"]}
        refused = await client.post("/v1/rerank", json=long)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "query")


@pytest.mark.stack
@pytest.mark.xdist_group("cross-encoder")
async def test_the_query_counts_as_often_as_it_is_read(triton):
    async with serving(GatewaySettings(triton=triton.grpc_address, limits={"prompt_bytes": 1000})) as (client, _):
        body = {"model": "bert", "query": "mat " * 10}
        assert (await client.post("/v1/rerank", json={**body, "documents": ["a"] * 20})).status_code == 200
        refused = await client.post("/v1/rerank", json={**body, "documents": ["a"] * 30})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.stack
@pytest.mark.xdist_group("cross-encoder")
async def test_types_that_the_model_does_not_have_are_refused(triton):
    from llmops.gateway.errors import ApiError
    from llmops.gateway.triton.encoder_client import TritonEncoder
    from llmops.gateway.triton.grpc_client import TritonClient
    from llmops.gateway.triton.model_metadata import EncoderMetadata

    client = TritonClient(triton.grpc_address)
    card = EncoderMetadata("bert", "openvino", "", 4, LENGTH, 300, 1)
    try:
        with pytest.raises(ApiError) as refused:
            await TritonEncoder(client.infer, "bert-score", card).run([[1, 5, 2]], [[0, 2, 1]])
        assert "token_type_ids: must be between 0 and 1" in refused.value.detail
    finally:
        await client.close()


def test_a_classifier_of_several_labels_is_refused(checkpoints, tmp_path):
    import transformers

    folder, model, _ = checkpoints["Bert"]
    config = transformers.BertConfig.from_dict({**model.config.to_dict(), "id2label": {0: "a", 1: "b", 2: "c"}})
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    with pytest.raises(CheckpointError, match="a classifier of 3 labels, and only cross-encoders"):
        open_encoder(str(tmp_path))
