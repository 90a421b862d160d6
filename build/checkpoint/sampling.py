"""What a checkpoint says of how it wants to be sampled."""

from __future__ import annotations

from pydantic import ValidationError

from llmops.build.checkpoint import Checkpoint
from llmops.build.engine_folder.manifest import SamplingDefaults
from llmops.errors import CheckpointError
from llmops.value_errors import explain


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """The sampling fields of generation_config.json; as in vLLM its `do_sample` is not looked at.

    Raises CheckpointError for a value that no engine could take.
    """
    given = {name: checkpoint.generation_config.get(name) for name in SamplingDefaults.model_fields}
    if given["top_k"] == -1:
        given["top_k"] = 0
    try:
        return SamplingDefaults.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{checkpoint.ref}: generation_config.json: {first['loc'][0]} is {first['input']!r} ({explain(first)}); "
            "correct it or remove the line."
        ) from error
