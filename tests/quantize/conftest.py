import functools

import pytest

from tests.support.tiny_models import export_quantised, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(family, **overrides)`: a tiny random model, made once per session."""
    from llmops.build.checkpoint import open_checkpoint

    @functools.cache
    def get(family, **overrides):
        return open_checkpoint(str(write_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)))

    return get


@pytest.fixture
def export(checkpoint, tmp_path):
    """Quantise a tiny model and export it: (source weights, folder, checkpoint)."""
    from llmops.build.quant_formats import format_of

    def run(family, quant, target="tensorrt", tp=1, pp=1, kv="auto", group=None, **overrides):
        source, folder = checkpoint(family, **overrides), tmp_path / "export"
        weights = export_quantised(source, folder, format_of(quant, target), target, tp=tp, pp=pp, kv=kv, group=group)
        return weights, folder, source

    return run
