"""The build specification: the options of `llmops build`, checked.

Each error message names the option and a remedy.
"""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmops.build.target_facts import TARGETS, TargetName
from llmops.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


#: Settings of some targets that have their own flag. The target checks such a setting like `--set
#: KEY=VALUE`.
FLAG_SETTINGS = ("calib_batch_size", "calib_seed", "max_ppl_ratio", "min_top1", "max_mean_kl", "max_token_kl")


@dataclass(frozen=True)
class BuildSpec:
    """The options of one build. With None, the target chooses.

    Lengths are in tokens. `checkpoint` is the path or name that the user typed. The target checks
    `quant` and `kv_cache`. `options` holds the target's own settings (`--set KEY=VALUE`), and
    `plan` the BuildPlan that set other fields. With `deterministic`, a greedy answer must not
    depend on other requests in the batch. The engine uses `tp` × `pp` GPUs, and `ep` divides `tp`.
    """

    checkpoint: str
    output: Path
    target: TargetName = "openvino"
    name: str | None = None
    quant: str = "none"
    kv_cache: str = "auto"
    group_size: int | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    gpu: str | None = None
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    calib_dataset: str | None = None
    calib_size: int | None = None
    calib_seq_len: int | None = None
    deterministic: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise InputError(f"--target {self.target} is unknown; use one of {', '.join(TARGETS)}.")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise InputError(
                f"--name {self.name!r} cannot name a Triton model; use letters, digits, dot, dash and underscore "
                "(at most 63, a letter or digit first)."
            )
        for flag in ("max_batch_size", "max_seq_len", "max_num_tokens", "group_size", "calib_size", "calib_seq_len"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise InputError(f"--{flag.replace('_', '-')} {value} is too small; give at least 1.")
        self._check_parallelism()

    def _check_parallelism(self) -> None:
        for flag in ("tp", "pp", "ep"):
            if getattr(self, flag) < 1:
                raise InputError(f"--{flag} {getattr(self, flag)} is too small; give at least 1.")
        if self.tp % self.ep:
            raise InputError(
                f"--ep {self.ep} must divide --tp {self.tp}: experts are spread over the tensor-parallel GPUs."
            )

    def key_fields(self) -> dict[str, Any]:
        """Return the fields that change the engine: all but checkpoint, output and predictions."""
        fields = asdict(self)
        del fields["checkpoint"], fields["output"]
        # The build key identifies adapters by their content, like the checkpoint.
        fields["options"].pop("adapters", None)
        if not self.deterministic:
            del fields["deterministic"]
        if self.plan:  # Predictions do not change the engine.
            fields["plan"] = {name: value for name, value in self.plan.items() if name not in ("predicted", "model")}
        return fields


def setting_flag(name: str) -> str:
    """Return the command-line option of a target's setting: the setting's own flag, or --set."""
    if name == "adapters":
        return "--adapter"
    if name in FLAG_SETTINGS:
        return f"--{name.replace('_', '-')}"
    return f"setting --set {name}"
