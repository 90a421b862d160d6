"""Sample models for the deep checks: an engine without weights, and a tokenizer of single bytes."""

import json
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmops import contract
from llmops.build.engine_folder.manifest import EngineLimits, EngineManifest, Source, TokenizerInfo
from llmops.build.engine_folder.manifest_extras import extra_type
from llmops.build.target_facts import TargetName
from llmops.build.trtllm.container_images import DEFAULT_TAG, IMAGES
from llmops.contract import POSTPROCESSING_SUFFIX, PREPROCESSING_SUFFIX, Tensor
from llmops.model_repository.generate import EngineEntry, model_folders, write_model
from llmops.model_repository.launch import Ports, start_triton
from llmops.model_repository.repository.validation import check_repository
from llmops.model_repository.targets import find_target

#: Each build target, with each backend that serves its engines.
TARGETS: tuple[tuple[TargetName, str], ...] = (("tensorrt", "nvidia"), ("tensorrt", "llmops"), ("pytorch", ""))
_NAME = "doctor"
_TEXT = "Größe: 3 µm, 日本"
#: Maximum seconds for the start of a tritonserver with the two small models.
_READY_TIMEOUT = 300


def parse_sample_configs(folder: Path, target: TargetName, serving: str) -> str:
    """Write the repository of an engine for `target`, and return the names of its models.

    Each config.pbtxt is parsed with Triton's protobuf schema.

    Raises:
        InputError: A config.pbtxt does not follow Triton's schema.
    """
    for model in model_folders(_entry(folder / "engine", target, serving)):
        write_model(folder / "repository" / model.name, model)
    return ", ".join(check_repository(folder / "repository"))


def tokenizer_round_trip(folder: Path) -> str:
    """Send a text through a tokenizer and a detokenizer, and describe the result.

    Both models run in a tritonserver that is started for this check.

    Raises:
        LlmopsError: The server did not start.
        ValueError: The returned text differs from the sent text.
    """
    repository = folder / "repository"
    for model in model_folders(_entry(folder / "engine", "tensorrt")):
        if model.name.endswith((PREPROCESSING_SUFFIX, POSTPROCESSING_SUFFIX)):
            write_model(repository / model.name, model)
    with start_triton(repository, ports=Ports(0, 0, 0), metrics=False, on_log=lambda line: None) as server:
        server.wait_ready(_READY_TIMEOUT)
        client = triton.InferenceServerClient(server.grpc_address)
        try:
            query = np.array([[_TEXT.encode()]], dtype=np.object_)
            length = np.array([[1]], dtype=np.int32)
            given = {contract.PRE_QUERY: query, contract.PRE_REQUEST_OUTPUT_LEN: length}
            ids = _infer(client, f"{_NAME}{PREPROCESSING_SUFFIX}", given, contract.PRE_OUT_IDS)
            tokens = ids.reshape(1, 1, -1).astype(np.int32)
            given = {contract.POST_TOKENS: tokens, contract.POST_LENGTH: np.array([[ids.size]], dtype=np.int32)}
            text = _infer(client, f"{_NAME}{POSTPROCESSING_SUFFIX}", given, contract.POST_OUTPUT).item().decode()
        except triton.InferenceServerException as error:
            raise ValueError(f"Triton refused the request: {error.message()}") from error
        finally:
            client.close()
    if text != _TEXT:
        raise ValueError(f"{_TEXT!r} came back as {text!r}")
    return f"{ids.size} tokens and back"


def _infer(
    client: triton.InferenceServerClient, model: str, given: dict[Tensor, np.ndarray], output: Tensor
) -> np.ndarray:
    inputs = []
    for tensor, value in given.items():
        one = triton.InferInput(tensor.name, list(value.shape), "BYTES" if value.dtype == np.object_ else "INT32")
        one.set_data_from_numpy(value)
        inputs.append(one)
    result = client.infer(model, inputs, outputs=[triton.InferRequestedOutput(output.name)])
    found: np.ndarray = result.as_numpy(output.name)
    return found


def _entry(folder: Path, target: TargetName, serving: str = "") -> EngineEntry:
    """Create those parts of an engine folder that `llmops repo` reads, and return the entry."""
    image = IMAGES[DEFAULT_TAG]
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    vocabulary = _write_tokenizer(folder / "tokenizer")
    arguments = {"llm_args": {"backend": "pytorch"}} if target == "pytorch" else {}
    extra = extra_type(target, {}).model_validate({"tensorrt_llm": image.tensorrt_llm, **arguments})
    manifest = EngineManifest(
        key=_NAME, name=_NAME, target=target, architecture="LlamaForCausalLM", versions={},
        source=Source(checkpoint=_NAME, format="huggingface", files=[]),
        limits=EngineLimits(max_batch_size=8, max_seq_len=512, max_num_tokens=256),
        tokenizer=TokenizerInfo(
            vocab_size=vocabulary, bos_id=None, end_ids=[vocabulary - 1], pad_id=None, chat_template=False
        ),
        extra=extra,
    )  # fmt: skip
    return EngineEntry(_NAME, folder, manifest, find_target(target, serving))


def _write_tokenizer(folder: Path) -> int:
    """Write a tokenizer with a token per byte and an end token. Return its vocabulary size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return len(alphabet) + 1
