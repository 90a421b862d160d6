"""What a checkpoint says of how it wants to be sampled."""

from __future__ import annotations

from pydantic import ValidationError

from llmops.build.checkpoint import Checkpoint
from llmops.build.engine_folder.manifest import RecommendedSampling
from llmops.errors import CheckpointError
from llmops.validation_errors import explain_error


def sampling_defaults(checkpoint: Checkpoint) -> RecommendedSampling:
    """The sampling fields of generation_config.json; as in vLLM its `do_sample` is not looked at.

    Raises CheckpointError for a value that no engine could take.
    """
    given = {name: checkpoint.generation_config.get(name) for name in RecommendedSampling.model_fields}
    if given["top_k"] == -1:
        given["top_k"] = 0
    try:
        return RecommendedSampling.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{checkpoint.ref}: generation_config.json: {first['loc'][0]} is {first['input']!r} ({explain_error(first)}); "
            "correct it or remove the line."
        ) from error
