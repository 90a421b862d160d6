"""The Triton models NAME-embedding and NAME-score, which turn token ids into vectors or scores."""

from __future__ import annotations

import json
import sys

import llmops_contract as contract
import numpy as np
import triton_python_backend_utils as pb_utils

# `import openvino` reports itself to Google Analytics from a process of its own. OpenVINO uses
# its silent stub when this package cannot be imported.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
import openvino as ov  # noqa: E402


class TritonPythonModel:
    """An encoder on OpenVINO. The requests that Triton has gathered run in one batch."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model."""
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config["parameters"].items()}
        self._output = config["output"][0]["name"]
        # Use float32, because bfloat16 arithmetic would change the vectors noticeably. Do not pin
        # threads, because models that share cores would wait for each other.
        hints = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}
        self._model = ov.Core().compile_model(parameters["model_path"], "CPU", hints)
        self._vocab_size, self._max_length = int(parameters["vocab_size"]), int(parameters["max_seq_len"])
        self._max_batch, self._types = int(parameters["max_batch_size"]), int(parameters.get("type_vocab_size", "1"))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Return a response for each request."""
        problems: list[str | None] = []
        # token ids [1, length], or token ids and types [2, length] for a cross-encoder
        rows: list[np.ndarray] = []
        counts: list[int] = []
        for request in requests:
            problem, request_rows = self._rows({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
            problems.append(problem)
            counts.append(len(request_rows))
            rows.extend(request_rows)
        vectors = self._run(rows)
        return self._responses(problems, counts, vectors)

    def _rows(self, tensors: dict[str, np.ndarray]) -> tuple[str | None, list[np.ndarray]]:
        """Return None and the rows of a request, or the reason for its rejection and no rows."""
        lengths = tensors[contract.EMBEDDING_LENGTHS.name].reshape(-1)
        ids = tensors[contract.EMBEDDING_IDS.name]
        if lengths.size != ids.shape[0] or lengths.min() < 1 or lengths.max() > min(ids.shape[1], self._max_length):
            between = f"must be between 1 and {self._max_length}, and at most the number of ids"
            return f"{contract.EMBEDDING_LENGTHS}: {between}", []
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            return f"{contract.EMBEDDING_IDS}: must be between 0 and {self._vocab_size - 1}", []
        types = tensors.get(contract.SCORE_TYPES.name)
        if types is None:
            rows = ids[:, None]
        elif types.shape != ids.shape or types.min() < 0 or types.max() >= self._types:
            return f"{contract.SCORE_TYPES}: must be between 0 and {self._types - 1}, one for each id", []
        else:
            rows = np.stack([ids, types], 1)
        return None, [row[:, :length] for row, length in zip(rows, lengths, strict=True)]

    def _run(self, rows: list[np.ndarray]) -> np.ndarray:
        """Run rows of similar length together.

        All rows of a batch are padded to the longest.
        """
        order = sorted(range(len(rows)), key=lambda index: rows[index].shape[1])
        results: list[np.ndarray | None] = [None] * len(rows)
        for start in range(0, len(order), self._max_batch):
            chosen = order[start : start + self._max_batch]
            for index, vector in zip(chosen, self._infer([rows[index] for index in chosen]), strict=True):
                results[index] = vector
        return np.array(results, dtype=np.float32)

    def _infer(self, rows: list[np.ndarray]) -> np.ndarray:
        width = max(row.shape[1] for row in rows)
        padded = np.zeros((len(rows[0]), len(rows), width), dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for index, row in enumerate(rows):
            padded[:, index, : row.shape[1]], mask[index, : row.shape[1]] = row, 1
        inputs = {"input_ids": padded[0], "attention_mask": mask}
        if len(padded) == 2:
            inputs["token_type_ids"] = padded[1]
        return np.array(self._model(inputs)[self._output], dtype=np.float32)

    def _responses(
        self, problems: list[str | None], counts: list[int], vectors: np.ndarray
    ) -> list[pb_utils.InferenceResponse]:
        responses, start = [], 0
        for problem, count in zip(problems, counts, strict=True):
            if problem is not None:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(problem)))
                continue
            output = pb_utils.Tensor(self._output, vectors[start : start + count])
            responses.append(pb_utils.InferenceResponse([output]))
            start += count
        return responses
