"""The GPUs that can be planned for. Peaks are dense (no sparsity), from NVIDIA's data sheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from llmops.errors import InputError

GB = 10**9
TERA = 10**12
MIB = 2**20


@dataclass(frozen=True)
class GpuSpec:
    """The data sheet of a GPU.

    `memory` is in bytes that a process can use, `bandwidth` of HBM in B/s. `bf16`, `fp8` and `int8`
    are peak operations/s, 0 if the GPU lacks the dtype. `link` is B/s to other GPUs of the node in
    one direction, `network` to other nodes. `price` is the $/h assumed when the user gives none;
    `silicon` is AIConfigurator's name of the system.
    """

    name: str
    sm: int
    memory: int
    bandwidth: float
    bf16: float
    fp8: float
    int8: float
    link: float
    price: float
    network: float = 50 * GB
    per_node: int = 8
    silicon: str | None = None

    def flops(self, dtype: str) -> float:
        """Return the peak operations/s of `bf16` (also fp16), `fp8` or `int8`. A dtype that the GPU
        lacks computes in bf16.
        """
        peak = {"fp8": self.fp8, "int8": self.int8}.get(dtype, self.bf16)
        return peak or self.bf16

    def at_price(self, price: float) -> GpuSpec:
        """Return the GPU at another price in $/h."""
        return replace(self, price=price)


_ALL = (
    GpuSpec(
        "h100-sxm",
        90,
        81559 * MIB,
        3.35 * TERA,
        989 * TERA,
        1979 * TERA,
        1979 * TERA,
        450 * GB,
        2.99,
        silicon="h100_sxm",
    ),
    GpuSpec(
        "h200-sxm",
        90,
        143771 * MIB,
        4.8 * TERA,
        989 * TERA,
        1979 * TERA,
        1979 * TERA,
        450 * GB,
        3.79,
        silicon="h200_sxm",
    ),
    GpuSpec("h100-pcie", 90, 81559 * MIB, 2.0 * TERA, 756 * TERA, 1513 * TERA, 1513 * TERA, 64 * GB, 2.39),
    GpuSpec(
        "b200-sxm",
        100,
        183359 * MIB,
        8.0 * TERA,
        2250 * TERA,
        4500 * TERA,
        4500 * TERA,
        900 * GB,
        5.49,
        silicon="b200_sxm",
    ),
    GpuSpec("a100-sxm", 80, 81920 * MIB, 2.039 * TERA, 312 * TERA, 0, 624 * TERA, 300 * GB, 1.79, silicon="a100_sxm"),
    GpuSpec("a100-pcie", 80, 81920 * MIB, 1.935 * TERA, 312 * TERA, 0, 624 * TERA, 32 * GB, 1.39),
    GpuSpec("l40s", 89, 46068 * MIB, 0.864 * TERA, 362 * TERA, 733 * TERA, 733 * TERA, 32 * GB, 0.89, silicon="l40s"),
    GpuSpec("l4", 89, 23034 * MIB, 0.3 * TERA, 121 * TERA, 242 * TERA, 242 * TERA, 32 * GB, 0.49),
)
GPUS: dict[str, GpuSpec] = {gpu.name: gpu for gpu in _ALL}
_ALIASES = {"h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm", "a100": "a100-sxm"}


def find_gpu(name: str) -> GpuSpec:
    """Return the GPU of that name; `h100` is `h100-sxm`.

    Raises:
        InputError: The GPU is unknown. The message lists the known ones and suggests the nearest.
    """
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in GPUS:
        return GPUS[key]
    near = difflib.get_close_matches(key, [*GPUS, *_ALIASES], n=1, cutoff=0.4)
    hint = f". Did you mean {near[0]}?" if near else "."
    raise InputError(f"The GPU {name!r} is unknown; choose one of {', '.join(GPUS)}{hint}")
