"""Faults of a machine and hangs of an engine: what counts, what does not, and what `serve` does."""

import os
import re
from pathlib import Path

import pytest

from llmops.model_repository.server.fault_watch import (
    FATAL_XIDS,
    FaultSources,
    FaultWatch,
    GpuFaultDetector,
    KernelLog,
    ProgressDetector,
    RestartBudget,
    find_xid,
    parse_samples,
)
from tests.support.nvidia_smi import install_nvidia_smi

#: NVSWITCH_PRINT_SXID and what it is called with: common_nvswitch.h and intr_nvswitch.h of NVIDIA's
#: open-gpu-kernel-modules 595.45.04.
SXID = "[ 96.1] nvidia-nvswitch1: SXid (PCI:0000:06:00.0): {}"
XID = "[ 96.1] NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>', name=<unknown>, Ch 00000008"
NVLINK = "NVRM: Xid (PCI:0000:04:00): {}, {} XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 0x00000000)"


@pytest.mark.parametrize(
    ("line", "gpus", "found"),
    [
        (XID.format(79), (), "Xid 79 on GPU 0000:3b:00 (GPU has fallen off the bus)"),
        # of MIG devices: kernel_rc.c of NVIDIA's open-gpu-kernel-modules 595.45.04
        (XID.format(94).replace("00)", "00 GPU-I:05)"), (), "Xid 94 on GPU 0000:3b:00 (contained ECC error)"),
        (XID.format(94).replace("00)", "00 GPU-I:05 GPU-CI:00)"), (), "Xid 94 on GPU 0000:3b:00 (contained ECC error)"),
        (XID.format(79), ("00000000:3B:00.0",), "Xid 79 on GPU 0000:3b:00 (GPU has fallen off the bus)"),
        # Blackwell's, as leptonai/gpud's tests of kernel logs have them
        (NVLINK.format(149, "NETIR_LINK_EVT Fatal"), (), "Xid 149 on GPU 0000:04:00 (fatal NVLink error)"),
        (NVLINK.format(145, "RLW_CTRL Nonfatal"), (), None),
        (SXID.format("20034, Fatal, Link 48 LTSSM Fault Up"), (), "SXid 20034 on NVSwitch 0000:06:00.0"),
        (SXID.format("20034, Fatal, Link 48 LTSSM Fault Up"), ("00000000:3B:00.0",), None),
        (SXID.format("12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"), (), None),
        (SXID.format("20034, Severity 1 Engine instance 60 Sub-engine instance 00"), (), None),
        # the GPU of another replica on this node
        (XID.format(79), ("00000000:5E:00.0",), None),
        # faults of a program
        (XID.format(13), (), None),
        (XID.format(31), (), None),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-aaaa", (), None),
    ],
)
def test_an_xid_of_hardware_is_a_fault(line, gpus, found):
    assert find_xid(["usb 1-1: new device", line], gpus) == found


#: What NVIDIA's catalog has as the immediate action of "Resolution Bucket", where it names another than restarting
#: the application: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html of October 2025.
RESETS = {46, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158}
IGNORED = {63, 66, 67, 92, 93, 121, 137, 141, 157, 160, 161}


def test_xids_are_fatal_after_which_nvidia_resets_the_gpu():
    assert set(FATAL_XIDS) >= RESETS
    assert not set(FATAL_XIDS) & IGNORED
    runbook = (Path(__file__).parents[2] / "deploy" / "runbooks.md").read_text()
    named = re.search(r"XID ([\d,\s]+or \d+), and after", runbook)[1]
    assert {int(number) for number in re.findall(r"\d+", named)} == set(FATAL_XIDS)


def test_a_kernel_log_is_followed_from_its_end_and_over_a_rotation(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text(XID.format(79) + "\n")
    log = KernelLog(path)
    assert log.lines() == []
    with path.open("a") as file:
        file.write("one\ntw")
    assert log.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert log.lines() == ["two"]
    os.rename(path, tmp_path / "kern.log.1")
    path.write_text("three\n")
    assert log.lines() == ["three"]
    log.close()


#: Records of /dev/kmsg on a sound machine with driver 580.159.04.
SOUND = (
    "3,355,571149,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
    "4,356,1202858,c;NVRM: gpuClearFbhubPoisonIntrForBug2924523_GA100: FBHUB Interrupt detected. Clearing it.\n"
)


def test_only_xids_of_the_gpus_that_nvidia_smi_lists_count(monkeypatch, tmp_path):
    install_nvidia_smi(monkeypatch, tmp_path)
    path = tmp_path / "kern.log"
    path.touch()
    watch = FaultWatch(FaultSources(kernel_log=path), None)
    lines = [SOUND, XID.format(79) + "\n", XID.format(79).replace("0000:3b:00", "0000:00:06") + "\n"]
    found = []
    for text in lines:
        with path.open("a") as file:
            file.write(text)
        found.append(watch.find_fault(0.0))
    watch.close()
    assert found == [None, None, "Xid 79 on GPU 0000:00:06 (GPU has fallen off the bus)"]


def page(**values: float) -> dict:
    labels = '{gpu="0",UUID="GPU-a",modelName="NVIDIA H100 80GB HBM3"}'
    lines = [f"{name}{labels} {value}" for name, value in values.items()]
    return parse_samples("# TYPE x counter\n" + "\n".join(lines))


@pytest.mark.parametrize(
    ("name", "before", "after", "found"),
    [
        ("DCGM_FI_DEV_XID_ERRORS", 0, 79, "Xid 79 on GPU 0"),
        ("DCGM_FI_DEV_XID_ERRORS", 0, 31, None),
        # an old fault is still shown when the server starts
        ("DCGM_FI_DEV_XID_ERRORS", 79, 79, None),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 2, 3, "double-bit ECC errors on GPU 0"),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 3, 0, None),
        ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", 0, 1, "NVLink recovery errors on GPU 0"),
        # 9 and 1 of 10 s, in nanoseconds: dcgm_fields.h of DCGM 4.5.3
        ("DCGM_FI_DEV_THERMAL_VIOLATION", 0, 9e9, "GPU 0 is throttled by its temperature"),
        ("DCGM_FI_DEV_THERMAL_VIOLATION", 0, 1e9, None),
        ("DCGM_FI_DEV_GPU_TEMP", 40, 80, None),
    ],
)
def test_dcgm_counts_a_fault_when_it_rises(name, before, after, found):
    detector = GpuFaultDetector()
    assert detector.update(page(**{name: before}), 100.0) is None
    fault = detector.update(page(**{name: after}), 110.0)
    assert (fault is None) if found is None else fault.startswith(found)
    assert detector.update(page(**{name: after}), 120.0) is None


def test_an_xid_is_found_by_its_gpu_though_labels_repeat_its_number():
    """The exporter's series: gpu_collector.go and default-counters.csv of dcgm-exporter 4.5.3-4.8.2."""
    series = 'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-a",Hostname="n",err_code="{0}",err_msg="{1}"}} {0}\n'
    detector = GpuFaultDetector()
    assert detector.update(parse_samples(series.format(0, "No Error")), 100.0) is None
    found = detector.update(parse_samples(series.format(79, "GPU has fallen off the bus")), 110.0)
    assert found == "Xid 79 on GPU 0 (GPU has fallen off the bus)"


def test_the_first_xid_of_a_gpu_is_found_where_its_series_begins_with_it():
    """DCGM 4.5.3 `dcgmlib/src/DcgmCacheManager.cpp`, GetLatestSample: AddBlankValue without an event; dcgm-exporter
    4.5.3-4.8.2 `gpu_collector.go`, toMetric: a blank value has no series."""
    temperature = 'DCGM_FI_DEV_GPU_TEMP{{gpu="{0}",UUID="GPU-{0}",Hostname="n",pod="{1}"}} 40\n'
    xid = 'DCGM_FI_DEV_XID_ERRORS{{gpu="{0}",UUID="GPU-{0}",Hostname="n",err_code="79",err_msg="x",pod="{1}"}} 79\n'
    detector = GpuFaultDetector()
    # an old one of another GPU, and no page of the exporter that has begun
    assert detector.update(parse_samples(""), 100.0) is None
    old = temperature.format(1, "") + xid.format(1, "")
    assert detector.update(parse_samples(old + temperature.format(0, "")), 110.0) is None
    # the exporter learns of the pod
    old = temperature.format(1, "one-0") + xid.format(1, "one-0")
    assert detector.update(parse_samples(old + temperature.format(0, "one-0")), 120.0) is None
    found = detector.update(parse_samples(old + temperature.format(0, "one-0") + xid.format(0, "one-0")), 130.0)
    assert found == "Xid 79 on GPU 0 (GPU has fallen off the bus)"


def gauges(active: float, steps: float) -> dict:
    return parse_samples(
        f'nv_trt_llm_request_metrics{{model="m",request_type="active",version="1"}} {active}\n'
        f'nv_trt_llm_general_metrics{{general_type="iteration_counter",model="m",version="1"}} {steps}\n'
    )


def test_an_engine_hangs_when_it_has_requests_and_makes_no_step():
    detector = ProgressDetector(60.0)
    # idle for long, then slow, then busy
    for now, active, steps in ((0, 0, 7), (500, 0, 7), (501, 1, 7), (550, 1, 7), (555, 1, 8), (600, 1, 8), (610, 1, 9)):
        assert detector.update(gauges(active, steps), now) is None
    assert detector.update(gauges(1, 9), 669.0) is None
    assert detector.update(gauges(1, 9), 671.0) == "m"


def test_restarts_are_limited_within_ten_minutes():
    budget = RestartBudget(3)
    assert [budget.take(now) for now in (0.0, 10.0, 20.0, 30.0)] == [True, True, True, False]
    assert budget.take(601.0)
    assert not RestartBudget(0).take(0.0)
