"""The table of GPUs that can be planned for.

Peak rates are dense (without sparsity), from NVIDIA's data sheets.
"""

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

    `sm` is the compute capability, such as 90. `memory` is the memory that a process can use, in
    bytes, and `bandwidth` is the rate of the HBM in B/s. `bf16`, `fp8` and `int8` are peak
    operations/s, or 0 if the GPU lacks the dtype. `link` is the rate to other GPUs of the node, and
    `network` the rate to other nodes, in B/s and one direction. `price` is the assumed price in
    $/h, unless the user gives another. `per_node` is the number of GPUs of a node. `silicon` is
    AIConfigurator's name of the system, if it has one.
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

    @property
    def multicast(self) -> bool:
        """Return True if a GPU can write to all GPUs of the node at once, through NVLink switches."""
        return self.sm >= 90 and self.link > 100 * GB

    def flops(self, dtype: str) -> float:
        """Return the peak operations/s of `bf16` (also fp16), `fp8` or `int8`.

        A GPU that lacks the dtype computes in bf16.
        """
        peaks = {"bf16": self.bf16, "fp16": self.bf16, "fp8": self.fp8, "int8": self.int8}
        return peaks[dtype] or self.bf16

    def at_price(self, price: float) -> GpuSpec:
        """Return the same GPU with another price, in $/h."""
        return replace(self, price=price)


def _gpu(
    name: str, sm: int, mib: int, terabytes: float, teraflops: tuple[int, int, int], link: int, price: float,
    silicon: str | None = None,
) -> GpuSpec:  # fmt: skip
    """Return a row of the table.

    Args:
        name: The name for `llmops plan --gpu`.
        sm: The compute capability, such as 90.
        mib: The memory in MiB.
        terabytes: The rate of the HBM in TB/s.
        teraflops: The peaks in BF16, FP8 and INT8, in TFLOP/s or TOP/s.
        link: The rate to other GPUs of the node in GB/s.
        price: The assumed price in $/h.
        silicon: AIConfigurator's name of the system, or None.
    """
    bf16, fp8, int8 = (peak * TERA for peak in teraflops)
    return GpuSpec(
        name=name, sm=sm, memory=mib * MIB, bandwidth=terabytes * TERA, bf16=bf16, fp8=fp8, int8=int8,
        link=link * GB, price=price, silicon=silicon,
    )  # fmt: skip


_ALL = (
    _gpu("h100-sxm", 90, 81559, 3.35, (989, 1979, 1979), 450, 2.99, "h100_sxm"),
    _gpu("h200-sxm", 90, 143771, 4.8, (989, 1979, 1979), 450, 3.79, "h200_sxm"),
    _gpu("h100-pcie", 90, 81559, 2.0, (756, 1513, 1513), 64, 2.39),
    _gpu("b200-sxm", 100, 183359, 8.0, (2250, 4500, 4500), 900, 5.49, "b200_sxm"),
    _gpu("a100-sxm", 80, 81920, 2.039, (312, 0, 624), 300, 1.79, "a100_sxm"),
    _gpu("a100-pcie", 80, 81920, 1.935, (312, 0, 624), 32, 1.39),
    _gpu("l40s", 89, 46068, 0.864, (362, 733, 733), 32, 0.89, "l40s"),
    _gpu("l4", 89, 23034, 0.3, (121, 242, 242), 32, 0.49),
)  # fmt: skip
GPUS: dict[str, GpuSpec] = {gpu.name: gpu for gpu in _ALL}
_ALIASES = {"h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm", "a100": "a100-sxm"}


def find_gpu(name: str) -> GpuSpec:
    """Return the GPU called `name`. The name `h100` means `h100-sxm`.

    Raises:
        InputError: The GPU is unknown. The message lists the known GPUs and suggests the nearest.
    """
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in GPUS:
        return GPUS[key]
    near = difflib.get_close_matches(key, [*GPUS, *_ALIASES], n=1, cutoff=0.4)
    hint = f". Did you mean {near[0]}?" if near else "."
    raise InputError(f"The GPU {name!r} is unknown; choose one of {', '.join(GPUS)}{hint}")
