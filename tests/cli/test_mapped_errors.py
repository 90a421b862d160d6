"""Errors of the system and of libraries become our sentences: what happened, why, and what to do.

HTTP and gRPC are in test_connections.py, YAML and pydantic in tests/gateway/test_strict_yaml.py, databases in
tests/store/test_failures.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import BaseModel, Field, ValidationError

from llmops.errors import InputError, LlmopsError, first_fault
from llmops.output_files import check_writable, write_text


@pytest.mark.parametrize(
    ("path", "why", "advice"),
    [
        ("{folder}/none/x", "No such file or directory", "create the folder first, or name a file in one that exists"),
        ("{folder}/file/x", "Not a directory", "name a file in a folder that exists"),
        ("{folder}", "Is a directory", "name a file in it"),
    ],
)
def test_a_file_that_cannot_be_written(tmp_path: Path, path: str, why: str, advice: str):
    (tmp_path / "file").touch()
    place = Path(path.format(folder=tmp_path))
    for write in (check_writable, lambda one: write_text(one, "x")):
        with pytest.raises(InputError) as refused:
            write(place)
        assert refused.value.message == f"{place} cannot be written ({why}); {advice}."
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_full_disk():
    with pytest.raises(InputError) as refused:
        write_text(Path("/dev/full"), "x")
    assert refused.value.message == (
        "/dev/full cannot be written (No space left on device); free some space, or name a file on another disk."
    )


class Model(BaseModel):
    a: int = Field(default=1, ge=1)
    b: list[str] = Field(default=["x"], min_length=1)
    c: int | str = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": "x"}, "a: it must be a whole number"),
        ({"a": 0}, "a: it must be at least 1"),
        ({"b": []}, "b: it must not be empty"),
        ({"b": [1]}, "b.0: it must be a text"),
        ({"c": []}, "c: it must be a whole number or it must be a text"),
        ([], "the file: it must be a mapping of names to values"),
    ],
)
def test_a_value_that_does_not_fit(value, said):
    with pytest.raises(ValidationError) as failed:
        Model.model_validate(value)
    assert first_fault(failed.value, "the file") == said


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("It failed: no disk..", "It failed: no disk."),
        ("It failed (a.). Then b.. Again.", "It failed (a.). Then b. Again."),
        ("Error: no disk.", "no disk."),
        ("Give ../x or ... instead.", "Give ../x or ... instead."),
        ("Wait …", "Wait …"),
    ],
)
def test_a_sentence_in_a_sentence_ends_once(message, said):
    assert LlmopsError(message).message == str(LlmopsError(message)) == said
