"""Which GPUs the library of this process may see."""

from __future__ import annotations

import os


def restrict_visible_gpus(ids: str) -> None:
    """Let this process, and the workers that it starts, see the GPUs with these numbers only.

    They count from 0 among those that the process sees already. Raises ValueError if it sees too
    few.
    """
    if not ids:
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [int(one) for one in ids.split(",")]
    if given is not None:
        visible = [one.strip() for one in given.split(",") if one.strip()]
        if max(numbers) >= len(visible):
            raise ValueError(
                f"the model runs on GPU {max(numbers)}, and CUDA_VISIBLE_DEVICES={given} shows {len(visible)}: show "
                "more, or make the repository again with `llmops repo --gpus`"
            )
        ids = ",".join(visible[number] for number in numbers)
    os.environ["CUDA_VISIBLE_DEVICES"] = ids
