"""Numbers: what a double cannot hold is refused wherever it stands, everything else is taken as it is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.http.body import parse


class Anything(BaseModel):
    before: str
    value: Any


DIGITS = st.integers(1, 320).map(lambda count: "7" * count)
ZERO = st.sampled_from(["", "0"])
EXPONENTS = st.builds(
    "{}{}{}{}".format, st.sampled_from("eE"), st.sampled_from(["", "+", "-"]), ZERO, st.integers(0, 420)
)
LITERALS = st.builds(
    "{}{}{}{}".format, st.sampled_from(["", "-"]), DIGITS, st.sampled_from(["", ".5"]), st.just("") | EXPONENTS
)


@given(LITERALS, st.text(max_size=12))
@example("1" + "0" * 308 + ".5", "")
@example("1" + "0" * 309 + ".5", "")
@example("9E+0309", "x")
@example("7" * 250 + "e99", "")
def test_a_number_that_no_double_holds_is_refused(literal: str, before: str) -> None:
    body = f'{{"before": {json.dumps(before)}, "value": [{literal}]}}'.encode()
    # an integer is one, however long
    if math.isinf(float(literal)) and not literal.lstrip("-").isdigit():
        with pytest.raises(InvalidRequestError, match="number"):
            parse(Anything, body)
    else:
        parse(Anything, body)
