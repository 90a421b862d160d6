"""Makes the mock engine's Triton repository."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.contract import CACHE_SALT, ENGINE_SUFFIX, RUNTIME_PARAMETER
from llmops.model_repository.generate import EngineEntry, generate_repository
from llmops.model_repository.targets import EngineModelConfig, find_target
from llmops.model_repository.targets.openvino import OpenVINORepositoryTarget
from tests.support.mock_engine.planned import Paged

NAME = "mock"
# one token, one message: for latencies, which tokens that share a character would blur
PLAIN = " the of and to in is that for it as was with be by on not he his but at are this have from or had an they"
# these replace files of the engine model
MODEL_FILES = Path(__file__).parent / "llmops_engine"


class MockTarget(OpenVINORepositoryTarget):
    """The OpenVINO target's tensors and transports with the mock engine's parameters; needs no weights."""

    def __init__(self, options: dict[str, Any], transports: list[str] | None) -> None:
        self._options = options
        self._paged = options["paged"] is not None
        self._transports = transports or find_target("openvino").transports()

    def check(self, directory: Path, manifest: EngineManifest) -> None:
        return

    def engine_model(self, directory: Path, manifest: EngineManifest) -> EngineModelConfig:
        model = super().engine_model(directory, manifest)
        parameters = {**model.parameters, RUNTIME_PARAMETER: NAME, "mock": json.dumps(self._options)}
        return replace(model, parameters=parameters)

    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        nothing = {"logprobs": False, "guided": [], "min_p": False}
        return {**super().capabilities(manifest), **nothing, CACHE_SALT.name: self._paged}

    def batch_invariant(self, manifest: EngineManifest) -> bool:
        return True

    def reports(self) -> dict[str, bool]:
        return {**super().reports(), "kv_events": self._paged, "cached_tokens": self._paged}

    def transports(self) -> list[str]:
        return self._transports


def make_mock_engine(
    engine: Path,
    output: Path,
    period: float = 0.02,
    first: float = 0.0,
    max_batch_size: int = 2048,
    transports: list[str] | None = None,
    text: str = PLAIN,
    paged: Paged | None = None,
    faults: Path | None = None,
    names: Sequence[str] = (NAME,),
    replay: Path | None = None,
    slow: Mapping[str, float] | None = None,
) -> Path:
    """Write the repository to `output`; tokenizer, chat template and limits are those of the `engine` folder.

    `period` and `first` in seconds, see MockRuntime; `transports` as in the card, all that there are by default;
    the tokens of `text` come over and over. `paged`: with a KV cache, at its own pace, and the tokens in no order.
    `faults`: the file in which `command_faults` says what is wrong with the engine. `names`: of as many equal ones.
    `replay`: the folder whose rules say what it answers, see Replay. `slow`: how many times as long the steps of some
    of `names` take.
    """
    manifest = EngineManifest.load(engine)
    batch, length = max_batch_size, 262_144
    if paged is not None:
        batch, length = paged.max_batch_size, min(length, paged.blocks * paged.tokens_per_block)
    limits = manifest.limits.model_copy(update={"max_batch_size": batch, "max_seq_len": length})
    manifest = manifest.model_copy(update={"limits": limits})
    tokenizer = engine / manifest.tokenizer.directory
    replayed = None
    if replay is not None:
        file, end = (tokenizer / "tokenizer.json").resolve(), manifest.tokenizer.end_ids[0]
        replayed = {"folder": str(replay.resolve()), "tokenizer": str(file), "end": end}
    options = {
        "period": period,
        "first": first,
        "token_ids": _token_ids(tokenizer, text),
        "paged": paged.options() if paged else None,
        "faults": str(faults.resolve()) if faults else "",
        "replay": replayed,
    }
    entries = []
    for name in names:
        own = {**options, "factor": (slow or {}).get(name, 1.0), "name": name}
        entries.append(EngineEntry(name, engine.resolve(), manifest, MockTarget(own, transports)))
    generate_repository(entries, output)
    for name in names:
        package = output / f"{name}{ENGINE_SUFFIX}" / "1" / "llmops_engine"
        shutil.copytree(MODEL_FILES, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return output


def _token_ids(tokenizer: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids
