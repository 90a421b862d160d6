"""What `--quant` and `--kv-dtype` of `llmops plan` mean."""

from __future__ import annotations

from llmops.build.model.architecture import Architecture
from llmops.build.quant_formats import FORMATS, PLANNED, QuantFormat, format_of_method, planned_format
from llmops.errors import InputError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}


def find_precision(name: str, model: Architecture) -> QuantFormat:
    """`auto` takes what the checkpoint is stored in. Raises InputError that lists the known."""
    if name.lower() == "auto":
        return format_of_method(model.quant_method) or FORMATS["none"]
    found = planned_format(name)
    if found is None:
        known = ", ".join(form.label for form in PLANNED.values())
        raise InputError(f"The quantisation {name!r} is unknown; choose one of auto, {known}.")
    return found


def find_kv(name: str, precision: QuantFormat) -> str:
    """The KV cache's dtype: bf16, fp8 or int8; `auto` follows the weights. Raises InputError."""
    key = {"auto": precision.kv, "fp16": "bf16"}.get(name.lower(), name.lower())
    if key not in KV_BYTES:
        raise InputError(f"The KV cache dtype {name!r} is unknown; choose one of auto, {', '.join(KV_BYTES)}.")
    return key
