"""GPUs by name: their memory, the sources of these figures, and the names that are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import memcheck
from memcheck import Place
from memcheck.cli.flags import parse
from memcheck.cli.options import Predicting
from memcheck.core.devices import (
    CONTEXT_BYTES,
    DEVICES,
    NOMINAL_SHARE,
    ROWS,
    catalog_name,
    device_named,
    this_gpu,
)
from memcheck.core.errors import UsageError
from memcheck.core.options import spoken_as_flags

MIB = 2**20
WANTED = """T4 V100-16GB V100-32GB A100-40GB A100-80GB A10 A40 RTX-A6000 RTX-3090 RTX-4090 L4 L40S H100-80GB
H100-80GB-SXM H100-80GB-PCIe H100-96GB H200 RTX-PRO-6000 RTX-4070-Ti-SUPER B200 GH200"""


@pytest.mark.parametrize("name", WANTED.split())
def test_the_catalog_has(name: str) -> None:
    assert DEVICES[name].name == name


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_device_has_less_to_give_than_it_has_and_says_how_that_is_known(device) -> None:
    assert device.kind == "cuda"
    assert 0 < device.usable_bytes < device.total_bytes
    assert device.architecture is not None
    assert (7, 0) <= device.architecture <= (12, 0)
    assert len(device.source) > 30


def test_the_fullest_row_that_ran_fits_the_a100() -> None:
    """Its 39,689 MiB of blocks are in 39,746 MiB of segments, which is more than the rule gives."""
    a100 = DEVICES["A100-40GB"]
    assert a100.usable_bytes == 39_746 * MIB > a100.total_bytes - CONTEXT_BYTES
    assert "memcheck_pyt" in a100.source


def test_the_rule_for_nominal_sizes_is_below_every_gpu_that_is_known() -> None:
    known = [row for row in ROWS if row["total_mib"]]
    assert len(known) > 15
    for row in known:
        by_rule = NOMINAL_SHARE * int(row["nominal_gb"]) * 2**30 - CONTEXT_BYTES
        assert by_rule < DEVICES[row["name"]].usable_bytes, row["name"]
    nominal = [DEVICES[row["name"]] for row in ROWS if not row["total_mib"]]
    assert nominal
    assert all("by rule: 90 %" in device.source for device in nominal)


@pytest.mark.parametrize("device", [device for device in DEVICES.values() if device.usable_bytes], ids=lambda d: d.name)
def test_it_is_found_by_its_own_name_in_any_case(device) -> None:
    assert device_named(device.name) is device
    assert device_named(f" {device.name.lower()} ") is device
    assert device_named(device.name.replace("-", "_")) is device


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("A6000", "RTX-A6000"),
        ("A10", "A10"),
        ("L4", "L4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
    ],
)
def test_names_that_people_write(text: str, name: str) -> None:
    assert device_named(text).name == name


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 * 2**30), ("80 GB", 80 * 10**9), ("1.5gib", 3 * 2**29), ("42949672960B", 40 * 2**30)],
)
def test_a_size_is_a_gpu_of_which_nothing_else_is_known(text: str, size: int) -> None:
    device = device_named(text)
    assert (device.kind, device.architecture, device.name) == ("cuda", None, text)
    assert device.total_bytes == device.usable_bytes == size


def test_a_cpu_has_no_limit_of_its_own() -> None:
    device = device_named("CPU")
    assert (device.name, device.kind, device.usable_bytes) == ("cpu", "cpu", None)
    assert device.total_bytes > 2**28


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("toaster", "device toaster is unknown; known: cpu, a size such as 40GiB, and T4, V100-16GB"),
        ("A100", "device A100 is one of several: A100-40GB, A100-80GB"),
        ("h100", "H100-80GB, H100-80GB-SXM, H100-80GB-PCIe, H100-NVL"),
        ("4080", "device 4080 is no GPU, and a size needs a unit: 4080 what? write 4080GiB; known: cpu"),
        ("24", "device 24 is no GPU, and a size needs a unit: 24 what? write 24GiB"),
        ("40 apples", "device 40 apples is unknown"),
        ("RTX-409", "did you mean RTX-4090?"),
        ("A100-40", "did you mean A100-40GB?"),
        ("", "device  is unknown"),
    ],
)
def test_what_is_no_device(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        device_named(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA L40S", "L40S"),
        ("H200", "H200"),
        ("GeForce GTX 1080", None),
        (None, None),
    ],
)
def test_what_drivers_call_them(driver: str | None, name: str | None) -> None:
    assert catalog_name(driver) == name


def pretend_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA L40S", major=8, minor=9, multi_processor_count=142)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((40 + index) * 2**30, 44 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 2**30)


def test_this_gpu_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)
    device = this_gpu(1)
    assert (device.name, device.kind, device.architecture) == ("NVIDIA L40S", "cuda", (8, 9))
    assert (device.total_bytes, device.usable_bytes) == (44 * 2**30, 42 * 2**30)
    assert device_named("cuda:1") == device
    assert device_named("cuda") == this_gpu(0) != device
    with pytest.raises(UsageError, match="GPU 2 of this machine is absent"):
        this_gpu(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize("flags", ["--device cuda", "--device-from-this-gpu", "--device-from-this-gpu 1"])
def test_no_gpu_here(flags: str) -> None:
    with pytest.raises(UsageError, match=r"of this machine is absent: torch .* sees 0 CUDA devices"):
        flagged(flags)


def flagged(flags: str):
    with spoken_as_flags():
        return parse("predict", Predicting, flags.split()).place().device


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flagged("--device h200") is DEVICES["H200"]
    pretend_gpus(monkeypatch)
    assert flagged("") == flagged("--device-from-this-gpu") == flagged("--device cuda:0") == this_gpu(0)
    assert flagged("--device-from-this-gpu 1") == this_gpu(1)
    with pytest.raises(UsageError, match="--device T4 and --device-from-this-gpu exclude each other"):
        flagged("--device T4 --device-from-this-gpu")
    with pytest.raises(UsageError, match="--device-from-this-gpu must be the number of a GPU, got 'one'"):
        flagged("--device-from-this-gpu one")


def page_lines() -> Iterator[str]:
    for row in ROWS:
        device = DEVICES[row["name"]]
        major, minor = device.architecture or (0, 0)
        total = f"{device.total_bytes // MIB:,}" if row["total_mib"] else f"nominal {row['nominal_gb']} GB"
        yield f"| {device.name} | {major}.{minor} | {total} | {(device.usable_bytes or 0) // MIB:,} |"


def test_the_page_of_devices_is_the_catalog() -> None:
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    assert [line for line in page_lines() if line not in text] == []


def test_the_context_is_given_or_estimated() -> None:
    a100 = device_named("A100-40GB")
    assert a100.context_bytes == a100.total_bytes - (a100.usable_bytes or 0)
    assert device_named("H100-NVL").context_bytes == CONTEXT_BYTES
    assert device_named("40GiB").context_bytes == 0
    assert device_named("cpu").context_bytes is None
    given = Place("A100-40GB", cuda_context="2GiB").resolved()
    assert given.room_bytes == a100.total_bytes - 2**31
    assert given.for_device.context_bytes == 2**31
    assert "2 GiB given for the CUDA context" in given.for_device.source
    assert given.unlimited.room_bytes is None


def test_nvidia_smi_shows_segments_and_the_context() -> None:
    x = torch.empty(2**18, device="meta")
    found = memcheck.predict_memory(torch.exp, x, device="A100-40GB", cuda_context="500MiB", backward=False)
    assert found.record.reserved_bytes == 2 * 2**20
    assert found.record.process_bytes == 502 * 2**20
    assert found.terms["process_bytes"]["CUDA context"] == 500 * 2**20
    too_much = memcheck.predict_memory(torch.exp, x, device="1GiB", cuda_context="1023MiB", backward=False)
    assert not too_much.fits
