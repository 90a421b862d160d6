"""TensorRT-LLM's word lists: what the tokenizer model writes, the engine model reads; and words found in a stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmops_engine.request import RequestRejectedError
from llmops_engine.runtimes.stop_words import StopWordMatcher
from llmops_engine.tensor_parser import word_list as read_words
from llmops_preprocessing.word_lists import embedding_bias, encode_word_list

words = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=6)


@given(words)
def test_a_word_list_survives_the_way_to_the_engine(given_words: list[list[int]]) -> None:
    tensor = encode_word_list(given_words)
    assert tensor.dtype == np.int32
    assert tensor.shape[:2] == (1, 2)
    assert read_words(tensor, "stop_words_list") == given_words


def test_the_layout_is_tensorrt_llms() -> None:
    # ids of all words in row 0, where each word ends in row 1, padded with -1
    assert encode_word_list([[5], [7, 8, 9]]).tolist() == [[[5, 7, 8, 9], [1, 4, -1, -1]]]


def test_an_offset_outside_the_ids_is_refused_by_name() -> None:
    with pytest.raises(RequestRejectedError, match=r"^stop_words_list: offset 9 is not within the 2 ids"):
        read_words(np.array([[[1, 2], [9, -1]]]), "stop_words_list")


@given(words.filter(bool), st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(1, 5), min_size=1))
def test_a_stop_word_is_found_wherever_the_steps_cut_it(
    stop_words: list[list[int]], tokens: list[int], sizes: list[int]
) -> None:
    expected = next(
        (
            end
            for end in range(1, len(tokens) + 1)
            if any(tokens[max(0, end - len(word)) : end] == word for word in stop_words)
        ),
        None,
    )
    matcher, position, turn = StopWordMatcher(stop_words), 0, 0
    while position < len(tokens):
        step = tokens[position : position + sizes[turn % len(sizes)]]
        turn += 1
        kept = matcher.find(step)
        if kept is not None:
            assert position + kept == expected
            return
        position += len(step)
    assert expected is None


def test_embedding_bias_needs_a_weight_for_each_word() -> None:
    with pytest.raises(ValueError, match=r"^embedding_bias_weights: 1 weights for 2 embedding_bias_words"):
        embedding_bias(None, ["a", "b"], [1.0], 10)
