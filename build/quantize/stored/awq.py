"""AutoAWQ's `quant_method: awq`, version gemm: `qweight` int32 (in, out / 8), `qzeros` (groups, out / 8), `scales`
float16 (groups, out); `in / groups` inputs share a scale. Eight 4-bit values lie in a word in the order 0 2 4 6 1 3 5
7 (AutoAWQ `awq/utils/packing_utils.py`)."""

from __future__ import annotations

from llmops.build.quantize.reading import InputRounding, Part
from llmops.build.quantize.stored.base import Stored, spread, unpacked

# at which place of a word the values 0, 1, … 7 lie
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq:
    names = frozenset({"qweight", "qzeros", "scales"})

    def quantised(self, stored: Stored) -> bool:
        return "qweight" in stored

    def part(self, stored: Stored, bounds: bool) -> Part:
        values = unpacked(stored["qweight"], 4, _PLACES)
        zeros = spread(unpacked(stored["qzeros"], 4, _PLACES), len(values), 0)
        scales = spread(stored["scales"].float(), len(values), 0)
        return ((values - zeros).float() * scales).T.contiguous(), None

    def rounding(self, stored: Stored) -> InputRounding | None:
        return None
