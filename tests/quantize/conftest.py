import pytest

from tests.support.tiny_models import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(family, **overrides)`: a tiny random model, made once per session."""
    from llmops.build.checkpoint import open_checkpoint

    made = {}

    def get(family, **overrides):
        key = (family, tuple(sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = open_checkpoint(str(write_checkpoint(folder, family, **overrides)))
        return made[key]

    return get


@pytest.fixture
def export(checkpoint, tmp_path):
    """Quantise a tiny model and export it: (source weights, folder, checkpoint)."""
    from llmops.build.progress import SilentProgress
    from llmops.build.quant_formats import format_of
    from llmops.build.quantize.calibration import CalibrationSettings
    from llmops.build.quantize.checkpoint_export import export_engine_checkpoint, export_hf_checkpoint
    from llmops.build.quantize.model_loading import load_model, load_tokenizer
    from llmops.build.quantize.module_fixes import split_experts
    from llmops.build.quantize.quantizer import quantize

    def run(family, quant, target="tensorrt", tp=1, pp=1, kv="auto", group=None, **overrides):
        source = checkpoint(family, **overrides)
        model = load_model(source)
        split_experts(model)
        weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
        settings = CalibrationSettings(size=2, seq_len=48)
        form = format_of(quant, target)
        quantize(model, load_tokenizer(source), form, kv, group, settings, SilentProgress())
        folder = tmp_path / "export"
        if target == "tensorrt":
            export_engine_checkpoint(model, source.architecture, form, folder, tp, pp)
        else:
            export_hf_checkpoint(model, source.architecture, form, folder)
        return weights, folder, source

    return run
