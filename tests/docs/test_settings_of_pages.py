"""The settings that pages show are accepted by the command that reads them."""

import re
from pathlib import Path

import pytest

from llmops.cli.service import service_file
from llmops.gateway.settings import load_settings

ROOT = Path(__file__).parents[2]
#: How files begin that other programs read: LiteLLM, Kubernetes, Prometheus.
OF_OTHERS = ("model_list", "apiVersion", "# prometheus.yml")
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in sorted(ROOT.joinpath("docs").rglob("*.md"))
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    if not block.startswith(OF_OTHERS)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_settings_is_accepted(block, tmp_path):
    file = tmp_path / "settings.yaml"
    if re.search(r"^profiles:", block, re.MULTILINE):
        # an llmops.yaml, or the profiles of one
        models = "" if re.search(r"^models:", block, re.MULTILINE) else "models: {chat: {checkpoint: smollm2}}\n"
        file.write_text(models + block)
        service_file.read(file)
    else:
        file.write_text(block)
        load_settings(file)
