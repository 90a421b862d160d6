"""AutoAWQ's `quant_method: awq`, version gemm: `qweight` int32 (in, out / 8), `qzeros` (groups, out / 8), `scales`
float16 (groups, out); `in / groups` inputs share a scale. Eight 4-bit values lie in a word in the order 0 2 4 6 1 3 5
7 (AutoAWQ `awq/utils/packing_utils.py`)."""

from __future__ import annotations

from llmops.build.quantize.exported_weights import InputRounding, Part
from llmops.build.quantize.layer_readers.reader_interface import Stored, expand_scales, unpack_words

# at which place of a word the values 0, 1, … 7 lie
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqReader:
    names = frozenset({"qweight", "qzeros", "scales"})

    def quantised(self, stored: Stored) -> bool:
        return "qweight" in stored

    def part(self, stored: Stored, bounds: bool) -> Part:
        values = unpack_words(stored["qweight"], 4, _PLACES)
        zeros = expand_scales(unpack_words(stored["qzeros"], 4, _PLACES), len(values), 0)
        scales = expand_scales(stored["scales"].float(), len(values), 0)
        return ((values - zeros).float() * scales).T.contiguous(), None

    def rounding(self, stored: Stored) -> InputRounding | None:
        return None
