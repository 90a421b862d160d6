"""NAME-embedding: token ids to vectors. All requests that Triton gathered run as one padded batch."""

from __future__ import annotations

import json

import llmops_contract as contract
import numpy as np
import openvino as ov
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        # float32 throughout: bfloat16 arithmetic would move the vectors by more than rounding
        properties = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        self._model = ov.Core().compile_model(parameters["model_path"], "CPU", properties)
        self._vocab_size, self._max_length = int(parameters["vocab_size"]), int(parameters["max_seq_len"])
        self._max_batch = int(parameters["max_batch_size"])

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        problems: list[str | None] = []
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
        return None, [row[:length] for row, length in zip(ids, lengths, strict=True)]

    def _run(self, rows: list[np.ndarray]) -> np.ndarray:
        """Rows of like length together: padding to the longest would make a short text pay for a long one."""
        order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
        results: list[np.ndarray | None] = [None] * len(rows)
        for start in range(0, len(order), self._max_batch):
            chosen = order[start : start + self._max_batch]
            for at, vector in zip(chosen, self._infer([rows[at] for at in chosen]), strict=True):
                results[at] = vector
        return np.array(results, dtype=np.float32)

    def _infer(self, rows: list[np.ndarray]) -> np.ndarray:
        width = max(len(row) for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row)], mask[at, : len(row)] = row, 1
        return np.array(self._model({"input_ids": ids, "attention_mask": mask})["embedding"], dtype=np.float32)

    @staticmethod
    def _answers(
        problems: list[str | None], counts: list[int], vectors: np.ndarray
    ) -> list[pb_utils.InferenceResponse]:
        answers, start = [], 0
        for problem, count in zip(problems, counts, strict=True):
            if problem is not None:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(problem)))
                continue
            own = vectors[start : start + count]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor(contract.EMBEDDING_VECTOR.name, own)]))
            start += count
        return answers
