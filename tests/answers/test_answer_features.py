"""Features of an answer's text, as the judge of a canary counts them."""

import pytest

from llmops.gateway.text.answer_features import describe_answer

PROMPT = "Tell me about the sea."
PROSE = "The sea is a large body of salt water that covers most of the planet, and it is home to many animals."
# token ids drawn at random from the vocabulary of SmolLM2
SCRAMBLED = (
    "Thunder enterpr dispplings(* devotional Probability literatures Mia milittoo hing lecturers histamine sprung ran "
    "behavesMartin mommy lighter Vinsimpl blockademsg Chapelwara Promotingroleum ovary op"
)


@pytest.mark.parametrize(
    ("prompt", "answer", "refused", "mismatch", "garbled"),
    [
        (PROMPT, PROSE, False, False, False),
        (PROMPT, SCRAMBLED, False, False, True),
        (PROMPT, "broken \ufffd bytes", False, False, True),
        (PROMPT, "สวัสดีครับ ทะเลมีสีฟ้าและสวยมาก", False, True, False),
        (PROMPT, "海はとても広くて、青いです。", False, True, False),
        ("海について教えて。", "海はとても広くて、青いです。", False, False, False),
        ("Как сказать «море» по-английски?", "The word is sea.", False, False, False),
        ("What does สวัสดี mean?", "สวัสดี is a greeting.", False, False, False),
        # a foreign word in an answer is no foreign answer
        (PROMPT, PROSE + " In Greek: θάλασσα.", False, False, False),
        (PROMPT, "I'm sorry, but I can't help with that.", True, False, False),
        (PROMPT, "I can’t do that.", True, False, False),
        (PROMPT, "I can see it from here.", False, False, False),
        (PROMPT, "", False, False, False),
    ],
)
def test_features(prompt, answer, refused, mismatch, garbled):
    assert describe_answer(prompt, answer) == (refused, mismatch, garbled)
