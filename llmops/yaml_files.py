"""Strict reading of YAML files, with errors that name the line, and portable writing.

PyYAML writes some texts without quotes that other readers take for a boolean or a number: the YAML
1.2 readers, and the Go reader of Helm, kubectl and Prometheus.
"""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from llmops.errors import InputError
from llmops.input_files import read_bounded

#: Maximum size of a file of settings in bytes. PyYAML takes seconds for one MiB.
MAX_YAML_BYTES = 2**20
#: Maximum number of keys in all mappings of a file, including the keys that `<<` repeats. A file
#: with ten thousand models has half as many.
MAX_MERGED_KEYS = 200_000

#: Maximum number of brackets that are open at once. The scanner's time grows with their square.
MAX_BRACKETS = 64


def read_yaml(path: Path, advice: str = "name a YAML file that can be read") -> Any:
    """Return the content of a YAML file.

    Args:
        path: The path of the file.
        advice: A clause that says what to do if the file cannot be read, such as "`llmops init`
            writes one".

    Raises:
        InputError: The file cannot be read, is not valid YAML, or has the same key twice in a
            mapping.
    """
    try:
        text = read_bounded(path, MAX_YAML_BYTES).decode()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}); {advice}.") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{path} is not text in UTF-8 (line {line}); save it as UTF-8.") from error
    try:
        return yaml.load(text, _StrictLoader)
    except _DuplicateKeyError as error:
        raise InputError(f"{path} has the key {error.problem}; keep one of them.") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML{_explain(error, text)}.") from error
    except (ValueError, TypeError, RecursionError) as error:
        # PyYAML raises these errors for a date that does not exist, a list as a key, and 300 nested
        # levels.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError(f"{path} has a value that cannot be read ({reason}); quote or remove it.") from error


def write_yaml(*documents: Any, width: int = 120) -> str:
    """Return `documents` as YAML that every reader parses to the same texts and numbers."""
    return yaml.dump_all(documents, Dumper=_PortableDumper, sort_keys=False, width=width)  # type: ignore[no-any-return]


def is_plain(text: str) -> bool:
    """Return True if YAML can hold `text` on one line without quotes."""
    return write_yaml(text, width=sys.maxsize).splitlines()[0] == text


class _PortableDumper(yaml.SafeDumper):
    """A YAML dumper for all readers.

    The dumper quotes text that some reader would misread, writes text of several lines as blocks,
    and writes no anchors.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_PortableDumper.add_representer(str, _represent_text)
# Text that matches one of these patterns is quoted. Booleans and numbers keep PyYAML's own forms.
_PortableDumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"[yYnN]$"), list("yYnN"))
_PortableDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?_*(0_*[xXoObB][-+_0-9a-fA-F]+|[.]?_*[0-9][0-9_]*[.]?[0-9_]*([eE][-+_]*[0-9_]+)?)$"),
    list("-+.0123456789"),
)


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that rejects a mapping with the same key twice.

    PyYAML itself keeps the last value without a warning.
    """

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= MAX_BRACKETS:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                raise _DuplicateKeyError(
                    None, None, f"`{name}` twice, in lines {lines[name]} and {line}", key.start_mark
                )
            lines[name] = line
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace merge keys (`<<`), and count the keys that they add.

        The number of keys can grow exponentially with the nesting of merge keys.
        """
        super().flatten_mapping(node)
        self._merged = getattr(self, "_merged", 0) + len(node.value)
        if self._merged > MAX_MERGED_KEYS:
            raise ValueError(f"the merge keys (`<<`) add up to more than {MAX_MERGED_KEYS:,} keys")


class _DuplicateKeyError(yaml.constructor.ConstructorError):
    """A key that occurs twice in a mapping."""


def _explain(error: yaml.YAMLError, text: str) -> str:
    """Return the position of a syntax error, with advice for common mistakes."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1
        return f" (line {line}): a character there cannot be printed; remove it"
    if mark is None:
        return ""
    return (
        f" (line {mark.line + 1}, column {mark.column + 1}): indent with spaces, close all quotes and brackets, and "
        "quote texts with special characters"
    )
