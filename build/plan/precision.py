"""How weights and the KV cache are stored, and what the matrix multiplications compute in."""

from __future__ import annotations

from dataclasses import dataclass

from llmops.build.model.architecture import Architecture
from llmops.errors import InputError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}


# "group" of a format with one scale per output channel
PER_CHANNEL = 1 << 30


@dataclass(frozen=True)
class Precision:
    """`bits` per quantised weight; `group` weights of an output channel share `scale_bytes`, `block` x `block` weights
    likewise, otherwise the tensor has them once; `pre_scale`: one 2-byte factor per input channel (AWQ); `parts`: which
    linear layers are quantised; `compute`: dtype of the multiplications; `sm`: the oldest GPU that runs it; `kv`: the
    cache's dtype by default. `table_bits`: bits of embedding and output head, which stay as they are (16) on GPUs."""

    name: str
    bits: int
    compute: str
    sm: int = 80
    group: int | None = None
    block: int | None = None
    scale_bytes: float = 0
    pre_scale: bool = False
    kv: str = "bf16"
    parts: frozenset[str] = frozenset({"attention", "mlp", "experts"})
    table_bits: int = 16

    @property
    def label(self) -> str:
        """As a user writes it."""
        return "bf16" if self.name == "none" else self.name

    def linear_bytes(self, inputs: int, outputs: int, part: str, dtype_bytes: int) -> int:
        """Bytes of one weight matrix with its scales; parts that stay unquantised take `dtype_bytes` per weight."""
        if part not in self.parts or self.bits == 16:
            return inputs * outputs * dtype_bytes
        weights = inputs * outputs * self.bits // 8
        return weights + self._scales(inputs, outputs) + (2 * inputs if self.pre_scale else 0)

    def table_bytes(self, rows: int, width: int, dtype_bytes: int) -> int:
        """Bytes of `rows` rows of the embedding or the output head; in 8 bits each row has a scale and a zero point."""
        return rows * width * dtype_bytes if self.table_bits == 16 else rows * (width + 3)

    def _scales(self, inputs: int, outputs: int) -> int:
        if self.block:
            return int(-(-inputs // self.block) * -(-outputs // self.block) * self.scale_bytes)
        if self.group:
            return int(outputs * -(-inputs // self.group) * self.scale_bytes)
        return int(self.scale_bytes)


_EXPERTS = frozenset({"experts"})
_ALL = (
    Precision("none", 16, "bf16"),
    Precision("fp8", 8, "fp8", sm=89, scale_bytes=8, kv="fp8"),
    Precision("fp8_pc_pt", 8, "fp8", sm=89, group=PER_CHANNEL, scale_bytes=4, kv="fp8"),
    Precision("fp8_block", 8, "fp8", sm=89, block=128, scale_bytes=4),
    Precision("int8_wo", 8, "bf16", group=PER_CHANNEL, scale_bytes=2),
    Precision("int8_sq", 8, "int8", group=PER_CHANNEL, scale_bytes=4),
    Precision("int4_wo", 4, "bf16", group=PER_CHANNEL, scale_bytes=2),
    Precision("int4_awq", 4, "bf16", group=128, scale_bytes=2, pre_scale=True),
    Precision("w4a8_awq", 4, "fp8", sm=89, group=128, scale_bytes=2, pre_scale=True, kv="fp8"),
    Precision("mxfp4", 4, "bf16", group=32, scale_bytes=1, parts=_EXPERTS),
)
PRECISIONS: dict[str, Precision] = {precision.name: precision for precision in _ALL}
# The openvino target's own formats: a float16 scale and an integer zero point, embedding and head in 8 bits.
OPENVINO = {
    "none": PRECISIONS["none"],
    "int8": Precision("int8", 8, "bf16", group=PER_CHANNEL, scale_bytes=3, table_bits=8),
    "int4": Precision("int4", 4, "bf16", group=128, scale_bytes=2.5, table_bits=8),
}
_ALIASES = {
    "bf16": "none",
    "fp16": "none",
    "bfloat16": "none",
    "float16": "none",
    "int8": "int8_wo",
    "int4": "int4_awq",
}
_OF_CHECKPOINT = {"fp8": "fp8_block", "mxfp4": "mxfp4", "awq": "int4_awq"}


def find_precision(name: str, model: Architecture) -> Precision:
    """`auto` takes what the checkpoint is stored in. Raises InputError that lists the known."""
    key = name.lower()
    if key == "auto":
        key = _OF_CHECKPOINT.get(model.quant_method or "", "none")
    key = _ALIASES.get(key, key)
    if key not in PRECISIONS:
        raise InputError(f"unknown quantisation {name!r}: take one of auto, bf16, {', '.join(list(PRECISIONS)[1:])}.")
    return PRECISIONS[key]


def find_kv(name: str, precision: Precision) -> str:
    """The KV cache's dtype: bf16, fp8 or int8; `auto` follows the weights. Raises InputError."""
    key = {"auto": precision.kv, "fp16": "bf16"}.get(name.lower(), name.lower())
    if key not in KV_BYTES:
        raise InputError(f"unknown KV cache dtype {name!r}: take one of auto, {', '.join(KV_BYTES)}.")
    return key
