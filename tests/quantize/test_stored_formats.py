"""Quantised checkpoints of others, read back: each format's arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.build.quantize.exported_weights import InputRounding
from llmops.build.quantize.layer_readers import reader_of
from llmops.errors import InputError
from tests.support.tiny_models import AWQ, FP8, GPTQ, compressed


def read(quantised, **stored):
    return reader_of({"quantization_config": quantised}, {}).weight(stored)


def word(values, bits):
    """The values of one 32-bit word, the first in the lowest bits, as a signed int32."""
    total = sum(value << (bits * place) for place, value in enumerate(values))
    return total - (1 << 32) if total >= 1 << 31 else total


def test_block_scales_by_hand():
    """(130, 257): blocks of 128 x 128, those at the edge cut short; each value is E4M3 times its block's scale."""
    weight = torch.full((130, 257), 1.5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    value = read(FP8, weight=weight, weight_scale_inv=scale)
    assert value.shape == (130, 257)
    for row, column, factor in ((0, 0, 1), (127, 127, 1), (0, 128, 2), (127, 256, 4), (128, 127, 8), (129, 256, 32)):
        assert value[row, column] == 1.5 * factor
    assert float(value.sum()) == 1.5 * (128 * (128 * 1 + 128 * 2 + 4) + 2 * (128 * 8 + 128 * 16 + 32))


def test_inputs_round_per_block():
    """448 is E4M3's largest: 1000 becomes 448 steps of 1000/448; in the second block 0.11 has 3 bits of mantissa."""
    value = torch.zeros(1, 4)
    value[0] = torch.tensor([1000.0, 1.0, 4.48, 0.011])
    rounded = InputRounding("e4m3_block", block=2).apply(value)
    step = 1000 / 448
    assert rounded[0, 0] == pytest.approx(1000.0)
    assert rounded[0, 1] == pytest.approx(0.4375 * step)  # 0.448 lies between 0.4375 and 0.46875
    assert rounded[0, 2] == pytest.approx(4.48)
    assert rounded[0, 3] == pytest.approx(1.125 * 0.01, rel=1e-5)  # 1.1 lies between 1.0, 1.125


def test_awq_by_hand():
    """One input row of eight outputs. AutoAWQ puts the outputs 0 2 4 6 1 3 5 7 into a word's places."""
    numbers, zeros = [0, 1, 2, 3, 4, 5, 14, 15], [8, 7, 6, 5, 4, 3, 2, 1]
    packed = [[word([values[place] for place in (0, 2, 4, 6, 1, 3, 5, 7)], 4)] for values in (numbers, zeros)]
    scales = torch.arange(1, 9).half().reshape(1, 8) / 4
    value = read(AWQ, qweight=torch.tensor(packed[:1], dtype=torch.int32),
                 qzeros=torch.tensor(packed[1:], dtype=torch.int32), scales=scales)  # fmt: skip
    assert value.shape == (8, 1)
    assert value[:, 0].tolist() == [(numbers[i] - zeros[i]) * (i + 1) / 4 for i in range(8)]


@pytest.mark.parametrize(("layout", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_by_hand(layout, offset):
    """Eight inputs in a word; `g_idx` says which of two groups each is in; v1 stores zero points less one."""
    numbers, groups, zeros = [3, 1, 4, 1, 5, 9, 2, 6], [0, 1, 0, 1, 1, 0, 0, 1], [7, 9]
    value = read(
        {**GPTQ, "checkpoint_format": layout},
        qweight=torch.tensor([[word(numbers, 4)] * 8], dtype=torch.int32),
        qzeros=torch.tensor([[word([zero] * 8, 4)] for zero in zeros], dtype=torch.int32),
        scales=torch.tensor([[0.5] * 8, [0.25] * 8]).half(),
        g_idx=torch.tensor(groups, dtype=torch.int32),
    )
    expected = [(n - zeros[g] - offset) * (0.5, 0.25)[g] for n, g in zip(numbers, groups, strict=True)]
    assert value.tolist() == [expected] * 8


def test_packed_integers_by_hand():
    """compressed-tensors: unsigned after adding 8, groups along the inputs, zero points packed along the outputs."""
    numbers, zeros = [-8, -1, 0, 7, 1, 2, 3, 4], [1, -2]
    stored = {
        "weight_packed": torch.tensor([[word([n + 8 for n in numbers], 4)]] * 2, dtype=torch.int32),
        "weight_scale": torch.tensor([[1.0, 2.0], [4.0, 8.0]]),
        "weight_shape": torch.tensor([2, 8]),
    }
    config = compressed("pack-quantized", 4, "int")
    assert read(config, **stored).tolist() == [
        [-8, -1, 0, 7, 2, 4, 6, 8], [-32, -4, 0, 28, 8, 16, 24, 32]
    ]  # fmt: skip
    packed_zeros = torch.tensor([[word([zeros[0] + 8, 8], 4), word([8, zeros[1] + 8], 4)]], dtype=torch.int32)
    assert read(config, **stored, weight_zero_point=packed_zeros).tolist() == [
        [-9, -2, -1, 6, 2, 4, 6, 8], [-32, -4, 0, 28, 24, 32, 40, 48]
    ]  # fmt: skip


def test_compressed_floats_and_integers_by_hand():
    weight = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    per_row = torch.tensor([[0.5], [2.0]])
    stored = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": per_row}
    assert read(compressed("float-quantized", 8, "float"), **stored).tolist() == [[0.5, -1.0], [1.0, 8.0]]
    stored = {"weight": torch.tensor([[1, -2], [3, 127]], dtype=torch.int8), "weight_scale": torch.tensor([0.5])}
    assert read(compressed("int-quantized", 8, "int"), **stored).tolist() == [[0.5, -1.0], [1.5, 63.5]]


@settings(max_examples=30)
@given(st.data(), st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(1, 40))
def test_what_was_packed_comes_back(data, bits, rows, columns):
    """Against the definition: value i of a row lies at bit i * bits."""
    from llmops.build.quantize.layer_readers import unpack_words

    row = st.lists(st.integers(0, 2**bits - 1), min_size=columns, max_size=columns)
    values = data.draw(st.lists(row, min_size=rows, max_size=rows))
    per_word = 32 // bits
    padded = [one + [0] * (-columns % per_word) for one in values]
    words = [[word(one[at : at + per_word], bits) for at in range(0, len(one), per_word)] for one in padded]
    assert unpack_words(torch.tensor(words, dtype=torch.int32), bits)[:, :columns].tolist() == values


@pytest.mark.parametrize(
    ("quantised", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes weights cannot be read back"),
        ({"quant_method": "mxfp4"}, "mxfp4 weights cannot be read back"),
        ({**AWQ, "version": "gemv"}, "AWQ weights of version gemv with 4 bits"),
        ({**GPTQ, "bits": 3}, "GPTQ weights of format gptq with 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "format marlin"),
        (compressed("nvfp4-pack-quantized", 4, "float"), "compressed-tensors weights in nvfp4-pack-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt's NVFP4 weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_so(quantised, says):
    with pytest.raises(InputError, match=says) as caught:
        reader_of({"quantization_config": quantised}, {})
    assert "measure the served model instead" in str(caught.value)
