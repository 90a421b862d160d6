"""Triton's log as a person reads it. The lines are real ones of tritonserver 2.51."""

from __future__ import annotations

from llmops.model_repository.server.triton_log import explain_failure, last_error, parse_line

LOADED = "I1121 09:34:19.123456 2475 model_lifecycle.cc:849] \"successfully loaded 'smollm2'\""
TABLE = "+------------------+------+"
FAILED = (
    "E1121 09:34:19.123456 2475 model_lifecycle.cc:655] \"failed to load 'echo' version 1: Internal: "
    'ValueError: no such engine\\n\\nAt:\\n  /r/echo/1/model.py(7): initialize\\n"'
)


NO_GPU = 'E1121 09:34:19.1 24 cuda_driver.cc:31] "CudaDriverHelper has not been initialized."'
ABORT = ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"]


def test_a_line_without_date_thread_and_source_file() -> None:
    assert str(parse_line(LOADED)) == "09:34:19 info    successfully loaded 'smollm2'"


def test_tables_and_what_a_machine_without_gpu_always_says_are_noise() -> None:
    assert parse_line(TABLE).is_noise
    assert parse_line('W1121 09:34:19.1 24 metrics.cc:811] "DCGM unable to start: DCGM initialization error"').is_noise
    assert not parse_line(LOADED).is_noise


def test_the_cause_is_the_exceptions_own_message() -> None:
    assert explain_failure([parse_line(LOADED), parse_line(FAILED)]) == "model echo did not load: no such engine"


def test_no_error_no_cause() -> None:
    assert explain_failure([parse_line(LOADED)]) is None
    assert explain_failure([parse_line(NO_GPU)]) is None
    assert last_error([parse_line(NO_GPU), parse_line(LOADED)]) is None


def test_what_a_library_says_before_it_aborts_is_a_cause() -> None:
    lines = [parse_line(line) for line in (NO_GPU, *ABORT, " 0# 0x000055EE4F2E452D in tritonserver")]
    assert explain_failure(lines) == "terminate called after throwing an instance of 'std::bad_alloc'"
    assert last_error(lines) == parse_line(ABORT[1])


def test_truncated_weights_say_which_command_makes_them_again() -> None:
    line = FAILED.replace(
        "ValueError: no such engine", "RuntimeError: Exception from core.cpp:84:\\nIncorrect weights in bin file!."
    )
    assert explain_failure([parse_line(line)]) == (
        "model echo did not load: the engine's weights are incomplete; build the engine again with `llmops build "
        "--force`, and the repository with `llmops repo`"
    )
