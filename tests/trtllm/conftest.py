"""The engine model's package is found where Triton's stub would find it."""

from tests.support.model_code import put_on_path

put_on_path("tensorrt_llm")
