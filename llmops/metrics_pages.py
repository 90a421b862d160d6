"""Bounded parsing of the metrics pages of engines.

The pages are parsed in the event loop, so a long page would delay the gateway's requests.
"""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from llmops.input_files import MALFORMED

#: Maximum number of characters of a sample. The parser's time grows with the square of a sample's
#: number of labels.
MAX_SAMPLE_LENGTH = 1024

#: Maximum number of characters of all parsed samples of one page, which take 0.2 s. A server with a
#: hundred models has 400,000.
MAX_CHARACTERS = 2**19


def parse_samples(page: str, prefixes: tuple[str, ...]) -> list[Sample]:
    """Return the samples of a page whose names begin with one of `prefixes`.

    Raises:
        ValueError: The samples are too many or too long, or are not in Prometheus' text format.
    """
    lines = [line for line in page.split("\n") if line.startswith(prefixes)]
    if sum(map(len, lines)) > MAX_CHARACTERS or max(map(len, lines), default=0) > MAX_SAMPLE_LENGTH:
        raise ValueError("the page has too many samples, or a sample that is too long")
    try:
        families: list[Metric] = list(text_string_to_metric_families("\n".join([*lines, ""])))
    except MALFORMED as error:
        # The parser raises various exceptions for text in another format.
        raise ValueError(f"not metrics ({type(error).__name__})") from error
    return [sample for family in families for sample in family.samples]
