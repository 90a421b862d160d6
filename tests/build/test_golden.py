"""Golden answers in engine.json, against transformers."""

from pathlib import Path

import pytest

pytest.importorskip("openvino")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmops.build.checkpoint import open_checkpoint
from llmops.build.checkpoint.golden_prompts import TOKENS, golden_prompts, golden_texts
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.job.build_engine import build
from llmops.build.progress import SilentProgress
from llmops.build.spec import BuildSpec
from tests.support.tiny_models import write_checkpoint

TEMPLATE = (
    "{{ bos_token }}{%- for message in messages %}{% if message.role == 'user' %}[{{ strftime_now('%d %B %Y') }}] "
    "{{ message.content | trim }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", fitted=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_build_keeps_what_transformers_answers(tiny: Path, tmp_path: Path) -> None:
    """Also of a quantised build: the answers are the source's."""
    build(BuildSpec(str(tiny), tmp_path / "engine", quant="int8"))
    native_golden_answers = EngineManifest.load(tmp_path / "engine").golden
    assert native_golden_answers is not None
    assert [one.text for one in native_golden_answers.answers] == golden_texts()
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for one in native_golden_answers.answers:
        ids = torch.tensor([one.ids])
        out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=2)
        assert one.tokens == out[0, ids.shape[1] :].tolist()
        with torch.inference_mode():
            scores = torch.log_softmax(model(out[:, :-1]).logits[0], -1)[ids.shape[1] - 1 :]
        expected = scores[torch.arange(len(one.tokens)), one.tokens].tolist()
        assert one.log_probs == pytest.approx(expected, abs=1e-3)


def test_a_build_without_the_memory_for_the_source_keeps_none_and_says_so(tiny, tmp_path, monkeypatch):
    """`tiny` has 32-bit weights, and OpenVINO holds them twice more: half of that is not enough."""
    from llmops.build.targets.openvino import native_golden_answers

    parameters, progress = open_checkpoint(str(tiny)).parameters, SilentProgress()
    monkeypatch.setattr(native_golden_answers, "available_memory", lambda: 4 * parameters)
    build(BuildSpec(str(tiny), tmp_path / "engine", quant="int8"), progress)
    assert EngineManifest.load(tmp_path / "engine").golden is None
    assert any(one.startswith("No golden answers are kept: the unquantised model needs") for one in progress.notes)


def test_prompts_are_rendered_as_transformers_does_on_any_day(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompts = golden_prompts(tiny, 512, pytest.fail)
    for prompt in prompts:
        assert tokenizer.decode(prompt.ids) == f"<s>[01 January 2025] {prompt.text}\n> "
        assert prompt.text_ids == tokenizer(prompt.text)["input_ids"]


def test_a_template_that_marks_the_assistants_text_has_golden_prompts(tmp_path: Path) -> None:
    """SmolLM3 has such a template. transformers renders the text inside (chat_template_utils.py, AssistantTracker)."""
    folder = write_checkpoint(tmp_path / "tiny", "llama")
    marked = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(marked + "{% generation %}> {% endgeneration %}")
    chat = [{"role": "user", "content": golden_texts()[0]}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, add_generation_prompt=True)
    assert golden_prompts(folder, 512, pytest.fail)[0].ids == expected["input_ids"]
