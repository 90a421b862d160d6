"""The models' own code is imported as Triton's stub finds it."""

from tests.support.model_code import put_on_path

put_on_path("preprocessing", "tensorrt_llm", "postprocessing")
