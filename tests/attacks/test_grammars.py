"""Grammars whose work grows with the answer, and what they cost the streams beside them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.structured.grammar import choice_grammar, json_schema_grammar, regex_grammar
from llmops.gateway.generation.structured.grammar.client_grammar import find_ambiguity, find_ebnf_error
from llmops.gateway.generation.structured.request_guide import parse_guide
from llmops.gateway.schemas.chat_request import ChatRequest
from tests.attacks.harness import record, scaled
from tests.support.engine_client import EngineClient, generation

#: Ambiguous without end: 4.3 s per token after 50 tokens where nothing watches it.
NESTED = "(([A-Za-z .,]* [A-Za-z .,]*)* ([A-Za-z .,]+ [A-Za-z .,]*)*)*"
#: A walk through random tokens hardly ever begins with "The"; the model does.
HIDDEN = f'root ::= "The" {NESTED} | [^T] [a-z]*'
#: Seconds that a stream may wait for a token while a neighbour's grammar is found out. A step
#: beside the grammar takes 0.1 s; the rest is for a machine with other work.
LONGEST_GAP = 1.5
#: Seconds that another tenant's new grammar may take while one tenant's slow grammars wait. On a
#: machine so busy that one alone takes longer, four times as much.
LONGEST_WAIT = 5


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
class TestOnTheEngine:
    """Grammars that reach the real engine without passing the gateway's rules."""

    @pytest.fixture
    def client(self, triton: Any) -> Iterator[Any]:
        client = EngineClient(triton.grpc_address)
        yield client
        client.close(cancel=True)

    @pytest.fixture
    def prompt(self, engine_dir: Path) -> list[int]:
        from tokenizers import Tokenizer

        question = "What is the capital of France? Tell me all about it."
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return list(Tokenizer.from_file(str(engine_dir / "tokenizer" / "tokenizer.json")).encode(text).ids)

    def test_a_grammar_that_was_cheap_when_it_was_tried_is_ended_and_remembered(self, client, prompt):
        guide = {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": HIDDEN}
        tokens = scaled(400, 4000)
        client.send("neighbour", **generation(prompt, tokens, end_id=-1))
        client.send("attack", **generation(prompt, tokens, end_id=-1, **guide))
        told, gaps, last = "", [], time.monotonic()
        received = 0
        while not told:
            request_id, tensors, final, error = client.receive()
            if request_id == "neighbour":
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
                assert not final, "the neighbour had all its tokens, and the attack went on"
            elif "output_ids" in tensors:
                received += 1
            told = error or ""
        record(f"ended after {received} tokens; longest gap of the neighbour {max(gaps[1:]):.3f} s")
        assert told.startswith("guided_decoding_guide: the grammar takes ")
        assert received > 0, "it was found out while it ran"
        assert max(gaps[1:]) < LONGEST_GAP
        client.send("again", **generation(prompt, 8, **guide))
        while not (again := client.receive())[3]:
            assert again[0] == "neighbour"
        assert again[3] == told

    @pytest.mark.parametrize("grammar", [f"root ::= {NESTED}", 'root ::= s\ns ::= s s | "a"'])
    def test_one_whose_work_grows_is_refused_before_it_runs(self, client: Any, prompt: list[int], grammar: str) -> None:
        guide = {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": grammar}
        answer = client.ask(prompt, new=200, **guide)
        assert not answer.ids
        assert answer.error.startswith("guided_decoding_guide: the grammar takes ")

    def test_slow_grammars_of_one_tenant_hold_up_no_other(self, client: Any, prompt: list[int]) -> None:
        client.send("neighbour", **generation(prompt, 4000, end_id=-1))
        gaps, last, waits = [], time.monotonic(), []
        for at in range(4):
            client.send(f"new{at}", **_guided(prompt, f'root ::= "new{at}"', "beta/two"))
            began, ended = time.monotonic(), False
            while not ended:
                request_id, _, final, error = client.receive()
                assert error is None
                ended = final and request_id == f"new{at}"
                if request_id == "neighbour":
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()
            waits.append(time.monotonic() - began)
            for slow in range(scaled(12, 60) if at == 0 else 0):
                client.send(f"slow{slow}", **_guided(prompt, f'root ::= "{slow}" [^"]{{0,{40 + slow}}}', "acme/one"))
        record(f"new grammars took {waits[0]:.1f} s before and {max(waits[1:]):.1f} s during the attack")
        record(f"longest gap of the neighbour {max(gaps[1:]):.2f} s")
        assert max(waits[1:]) < max(LONGEST_WAIT, 4 * waits[0])
        assert max(gaps[1:]) < LONGEST_GAP


def _guided(prompt: list[int], grammar: str, caller: str) -> dict[str, Any]:
    kinds = {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": grammar}
    return generation(prompt, 4, caller=caller, **kinds)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= (([a-z ]* [a-z ]*)* ([a-z ]+ [a-z ]*)*)*", 's ::= s s | "a"\nroot ::= s', 'root ::= ("" | "a")*',
        'root ::= ("a"?){3}', 'root ::= "a"*+', 'root ::= a\na ::= b | "x"\nb ::= a | "y" a',
        'root ::= t\nt ::= t{2} | "a"', 'root ::= x\nx ::= x y | "a"\ny ::= x',
        'root ::= x\nx ::= "b" | w x w x w\nw ::= [ ]*',
    ],
)  # fmt: skip
def test_the_gateway_refuses_grammars_that_can_be_read_in_endless_ways(grammar: str) -> None:
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "a"}], guided_grammar=grammar)
    with pytest.raises(InvalidRequestError, match=r"cannot be used as an EBNF grammar: .* ways"):
        parse_guide(request)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= v\nv ::= "[" w (v (w "," w v)*)? w "]" | [0-9]+\nw ::= [ \\t\\n]*',
        'root ::= e\ne ::= e "+" e | [0-9]+', 'root ::= "" | "b"', 'root ::= item ("," item)*\nitem ::= [a-z]+',
        'root ::= "a" root?', json_schema_grammar('{"type":"array","items":{"type":["object","null"]}}', True),
        regex_grammar("(a*)*b|(c|d*)+"), choice_grammar(("a", "ab", "b")),
    ],
)  # fmt: skip
def test_ordinary_grammars_pass(grammar: str) -> None:
    assert find_ambiguity(grammar) is None


@pytest.mark.parametrize("rule", ['r{next}? "a"?', 'r{next} | "a"', "(r{next} r{next})?"])
def test_a_long_grammar_is_judged_in_linear_time(rule: str) -> None:
    rules = "\n".join(f"r{at} ::= {rule.format(next=(at + 1) % 2500)}" for at in range(2500))
    start = time.thread_time()
    find_ambiguity(f"root ::= r0\n{rules}")
    assert time.thread_time() - start < 2, "two passes took 12 s for 3,000 rules"


_NAMES = "abc"
_SEQUENCES = st.lists(st.sampled_from([*_NAMES, "'x'"]), max_size=3)
_GRAMMARS = st.fixed_dictionaries({name: st.lists(_SEQUENCES, min_size=1, max_size=3) for name in _NAMES})


@given(_GRAMMARS)
def test_no_rule_that_becomes_itself_or_two_of_itself_passes(rules: dict[str, list[list[str]]]) -> None:
    """Grammars that pass are held against a search through what each rule can become."""
    lines = [f"{name} ::= {' | '.join(' '.join(one) or '()' for one in found)}" for name, found in rules.items()]
    text = "\n".join(["root ::= a", *lines]).replace("'x'", '"x"').replace("()", '""')
    if find_ambiguity(text) is None:
        for name in rules:
            forms = _forms(rules, name)
            assert (name,) not in forms, text
            assert (name, name) not in forms, text


@pytest.mark.parametrize("bounds", ["1" + " " * 100_000 + "x", " 2 , 3 ", "1" * 5000, "0,0" + "9" * 5000])
def test_a_long_repetition_costs_no_more_than_its_length(bounds: str) -> None:
    """Before the fix, 2.5 KB of spaces held all of a gateway's requests for ten seconds, and 5 KB for eighty."""
    grammar = f'root ::= "a"{{{bounds}}}'
    began = time.process_time()
    find_ebnf_error(grammar)
    assert find_ambiguity(grammar) is None
    assert time.process_time() - began < 1


def _forms(rules: dict[str, list[list[str]]], start: str) -> set[tuple[str, ...]]:
    """Return the sequences of at most four parts that a rule becomes, each in one step or more."""
    seen: set[tuple[str, ...]] = set()
    work: list[tuple[str, ...]] = [(start,)]
    while work:
        form = work.pop()
        for at, part in enumerate(form):
            for one in rules.get(part, []):
                found = (*form[:at], *one, *form[at + 1 :])
                if len(found) <= 4 and found not in seen:
                    seen.add(found)
                    work.append(found)
    return seen
