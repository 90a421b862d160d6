"""Quantised checkpoints of others, read back: each format's arithmetic by hand."""

import pytest
import torch

from llmops.build.quantize.exported_weights import InputRounding
from llmops.build.quantize.layer_readers import reader_of
from llmops.errors import InputError
from tests.support.tiny_models import FP8, compressed


def read(quantised, **stored):
    return reader_of({"quantization_config": quantised}, {}).weight(stored)


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


CHANNEL, TOKEN = ({"num_bits": 8, "type": "float", "strategy": name} for name in ("channel", "token"))


def test_compressed_floats_by_hand():
    stored = {"weight": torch.tensor([[1.0, -2.0], [0.5, 4.0]]).to(torch.float8_e4m3fn),
              "weight_scale": torch.tensor([[0.5], [2.0]])}  # fmt: skip
    quantised = compressed("float-quantized", CHANNEL, TOKEN)
    assert read(quantised, **stored).tolist() == [[0.5, -1.0], [1.0, 8.0]]
    assert reader_of({"quantization_config": quantised}, {}).rounding(stored) == InputRounding("e4m3_token")


def test_compressed_blocks_are_of_128_at_the_edge_too():
    inputs = {**TOKEN, "strategy": "group", "group_size": 128}
    quantised = compressed("float-quantized", {**CHANNEL, "strategy": "block"}, inputs)
    stored = {"weight": torch.ones(130, 128).to(torch.float8_e4m3fn), "weight_scale": torch.tensor([[2.0], [4.0]])}
    assert read(quantised, **stored)[:, 0].tolist() == [2.0] * 128 + [4.0] * 2
    assert reader_of({"quantization_config": quantised}, {}).rounding(stored) == InputRounding("e4m3_block", block=128)


@pytest.mark.parametrize(
    ("quantised", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes weights cannot be read back"),
        ({"quant_method": "mxfp4"}, "mxfp4 weights cannot be read back"),
        ({"quant_method": "awq"}, "awq weights cannot be read back"),
        ({**FP8, "weight_block_size": None}, "fp8 weights cannot be read back"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "compressed-tensors weights cannot"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt's NVFP4 weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_so(quantised, says):
    with pytest.raises(InputError, match=says) as caught:
        reader_of({"quantization_config": quantised}, {})
    assert "measure the served model instead" in str(caught.value)
