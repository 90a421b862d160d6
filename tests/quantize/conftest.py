import pytest

from tests.support.tiny_models import export_quantised, write_checkpoint


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
    from llmops.build.quant_formats import format_of
    from llmops.build.quantize.calibration import CalibrationSettings

    def run(family, quant, target="tensorrt", tp=1, pp=1, kv="auto", group=None, **overrides):
        source, folder = checkpoint(family, **overrides), tmp_path / "export"
        how = {"kv_cache": kv, "group_size": group, "settings": CalibrationSettings(size=2, seq_len=48)}
        weights = export_quantised(source, folder, format_of(quant, target), target, layout=(tp, pp), **how)
        return weights, folder, source

    return run
