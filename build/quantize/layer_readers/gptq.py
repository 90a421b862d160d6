"""`quant_method: gptq`: `qweight` int32 (in * bits / 32, out), `qzeros` (groups, out * bits / 32), `scales` float16
(groups, out), `g_idx` (in,) the group of each input. `checkpoint_format: gptq` stores zero points less one,
`gptq_v2` as they are (GPTQModel `utils/model.py`, convert_gptq_v1_to_v2_format)."""

from __future__ import annotations

import torch

from llmops.build.quantize.exported_weights import InputRounding, Part
from llmops.build.quantize.layer_readers.reader_interface import Stored, unpack_words


class GptqReader:
    names = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, bits: int, zero_offset: int) -> None:
        self.bits, self.zero_offset = bits, zero_offset

    def quantised(self, stored: Stored) -> bool:
        return "qweight" in stored

    def part(self, stored: Stored, bounds: bool) -> Part:
        values = unpack_words(stored["qweight"].T.contiguous(), self.bits)  # (out, in)
        scales = stored["scales"].float()
        zeros = unpack_words(stored["qzeros"], self.bits) + self.zero_offset
        size, groups = values.shape[1], len(scales)
        group = stored["g_idx"].long() if "g_idx" in stored else torch.arange(size) // -(-size // groups)
        return (values - zeros[group].T).float() * scales[group].T, None

    def rounding(self, stored: Stored) -> InputRounding | None:
        return None
