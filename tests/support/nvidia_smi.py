"""A stand-in for nvidia-smi with the output of version 580.159.04 beside an H200, without its UUID."""

from pathlib import Path

import pytest

from tests.support.programs import install_program

#: PCI address of the GPU, as nvidia-smi prints it.
PCI_ADDRESS = "00000000:00:06.0"

_SCRIPT = r"""#!/bin/sh
case "$*" in
"--query-gpu=name,memory.total,compute_cap,driver_version --format=csv,noheader")
    echo "NVIDIA H200, 143771 MiB, 9.0, {driver}" ;;
"--query-gpu=name,clocks.sm,clocks.max.sm,memory.total,memory.used --format=csv,noheader,nounits")
    echo "NVIDIA H200, 345, 1980, 143771, 4" ;;
"--query-gpu=pci.bus_id --format=csv,noheader")
    echo "{address}" ;;
-L)
    for number in {numbers}; do
        echo "GPU $number: NVIDIA H200 (UUID: GPU-0000000$number-0000-0000-0000-000000000000)"
    done ;;
*)
    printf 'Field "%s" is not a valid field to query.\n\n' "$*"
    exit 2 ;;
esac
"""


def install_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: int = 1, driver: str = "580.159.04"
) -> None:
    """Put the stand-in first on PATH. Queries that were not recorded fail as unknown fields do.

    Args:
        monkeypatch: Restores PATH after the test.
        folder: Where the program is written.
        gpus: GPUs that `nvidia-smi -L` lists; one was recorded.
        driver: The driver's version; 580.159.04 was recorded.
    """
    numbers = " ".join(map(str, range(gpus)))
    script = _SCRIPT.format(driver=driver, address=PCI_ADDRESS, numbers=numbers)
    install_program(monkeypatch, folder / "nvidia-smi", script)
