"""NAME-embedding, NAME-score: token ids to vectors or scores. All requests that Triton gathered run as one batch."""

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
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config["parameters"].items()}
        self._output = config["output"][0]["name"]
        # float32 throughout: bfloat16 arithmetic would move the vectors by more than rounding
        properties = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        self._model = ov.Core().compile_model(parameters["model_path"], "CPU", properties)
        self._vocab_size, self._max_length = int(parameters["vocab_size"]), int(parameters["max_seq_len"])
        self._max_batch, self._types = int(parameters["max_batch_size"]), int(parameters.get("type_vocab_size", "1"))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        problems: list[str | None] = []
        # token ids [1, length], of a cross-encoder with their types [2, length]
        rows: list[np.ndarray] = []
        counts: list[int] = []
        for request in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            problem, own = self._rows(given)
            problems.append(problem)
            counts.append(len(own))
            rows.extend(own)
        vectors = self._run(rows)
        return self._answers(problems, counts, vectors)

    def _rows(self, given: dict[str, np.ndarray]) -> tuple[str | None, list[np.ndarray]]:
        lengths = given[contract.EMBEDDING_LENGTHS.name].reshape(-1)
        ids = given[contract.EMBEDDING_IDS.name]
        if lengths.size != ids.shape[0] or lengths.min() < 1 or lengths.max() > min(ids.shape[1], self._max_length):
            between = f"must be between 1 and {self._max_length}, and no more than there are ids"
            return f"{contract.EMBEDDING_LENGTHS}: {between}", []
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            return f"{contract.EMBEDDING_IDS}: must be between 0 and {self._vocab_size - 1}", []
        types = given.get(contract.SCORE_TYPES.name)
        if types is None:
            rows = ids[:, None]
        elif types.shape != ids.shape or types.min() < 0 or types.max() >= self._types:
            return f"{contract.SCORE_TYPES}: must be between 0 and {self._types - 1}, as many as there are ids", []
        else:
            rows = np.stack([ids, types], 1)
        return None, [row[:, :length] for row, length in zip(rows, lengths, strict=True)]

    def _run(self, rows: list[np.ndarray]) -> np.ndarray:
        """Rows of like length together: padding to the longest would make a short text pay for a long one."""
        order = sorted(range(len(rows)), key=lambda at: rows[at].shape[1])
        results: list[np.ndarray | None] = [None] * len(rows)
        for start in range(0, len(order), self._max_batch):
            chosen = order[start : start + self._max_batch]
            for at, vector in zip(chosen, self._infer([rows[at] for at in chosen]), strict=True):
                results[at] = vector
        return np.array(results, dtype=np.float32)

    def _infer(self, rows: list[np.ndarray]) -> np.ndarray:
        width = max(row.shape[1] for row in rows)
        padded = np.zeros((len(rows[0]), len(rows), width), dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for at, row in enumerate(rows):
            padded[:, at, : row.shape[1]], mask[at, : row.shape[1]] = row, 1
        inputs = {"input_ids": padded[0], "attention_mask": mask}
        if len(padded) == 2:
            inputs["token_type_ids"] = padded[1]
        return np.array(self._model(inputs)[self._output], dtype=np.float32)

    def _answers(
        self, problems: list[str | None], counts: list[int], vectors: np.ndarray
    ) -> list[pb_utils.InferenceResponse]:
        answers, start = [], 0
        for problem, count in zip(problems, counts, strict=True):
            if problem is not None:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(problem)))
                continue
            own = vectors[start : start + count]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor(self._output, own)]))
            start += count
        return answers
