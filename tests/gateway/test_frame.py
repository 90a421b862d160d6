"""A frame puts the special tokens around texts that were tokenised without them, as the tokenizer itself would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from llmops.gateway.text.tokenizer import SpecialTokenFrame
from tests.support.tokenizer_files import byte_level_tokenizer

# by kind: one text, two texts
TEMPLATES = {
    "bert": ("[CLS] $A [SEP]", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"),
    "roberta": ("[CLS] $A [SEP]", "[CLS]:0 $A:0 [SEP]:0 [SEP]:0 $B:0 [SEP]:0"),
    "llama": ("[CLS] $A", "[CLS]:0 $A:0 [CLS]:1 $B:1"),
    "t5": ("$A [SEP]", "$A:0 [SEP]:0 $B:0 [SEP]:0"),
    "bare": None,
}


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request):
    made = byte_level_tokenizer([], special_tokens=["[CLS]", "[SEP]"])
    if TEMPLATES[request.param] is not None:
        single, pair = TEMPLATES[request.param]
        special = [("[CLS]", 0), ("[SEP]", 1)]
        made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return made


@settings(max_examples=30)
@given(first=st.text(max_size=12), second=st.text(max_size=12))
def test_as_the_tokenizer_does(tokenizer, first, second):
    one, two = (tokenizer.encode(text, add_special_tokens=False).ids for text in (first, second))
    assert SpecialTokenFrame(tokenizer, 1).ids(one) == tokenizer.encode(first).ids
    frame, whole = SpecialTokenFrame(tokenizer, 2), tokenizer.encode(first, second)
    assert (frame.ids(one, two), frame.types(one, two)) == (whole.ids, whole.type_ids)
    assert frame.size == len(whole.ids) - len(one) - len(two)
