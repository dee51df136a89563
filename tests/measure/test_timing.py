"""Doubts about times, tested with made-up times, because real ones vary."""

import os

import pytest
import torch

from memcheck.measure import machine as machines
from memcheck.measure import measurement
from memcheck.measure.measurement import measure_time

STEADY = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.0]


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 9.0, 9.0))


@pytest.fixture
def clock(monkeypatch):
    """A fake clock for passes of given durations: forward_ms.extend([...]). The backward takes no time."""

    class Clock:
        def __init__(self):
            self.now = 0.0
            self.forward_ms = []

        def perf_counter(self):
            return self.now

        def milliseconds(self, run):
            run()
            took = self.forward_ms.pop(0)
            self.now += took / 1e3
            return took

    clock = Clock()
    monkeypatch.setattr(measurement.time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(machines.Machine, "milliseconds", lambda self, run: clock.milliseconds(run))
    return clock


def timed(clock, times, **options):
    clock.forward_ms[:] = times
    return measure_time(torch.exp, torch.ones(3), backward=False, **options)


def test_steady_times_are_not_doubted(clock):
    measured = timed(clock, [9.0, 9.0, *STEADY], passes=8)
    assert (measured["forward_ms"], measured["passes"], measured["doubts"]) == (1.0, 8, ())
    assert measured["forward_ms_quartiles"] == pytest.approx((0.9975, 1.0025))


def test_passes_that_warm_up_do_not_count(clock):
    assert timed(clock, [500.0, 300.0, 7.0], passes=1)["forward_ms"] == 7.0
    assert clock.forward_ms == []


def test_wide_quartiles_are_a_doubt():
    assert measurement.doubts_of_times("forward", [1.0, 1.3, 1.0, 1.3, 1.0, 1.3, 1.0, 1.3]) == (
        "forward times scatter: the middle half of them spans 26% of the median",
    )
    assert measurement.doubts_of_times("forward", [1.0, 1.1] * 4) == ()


def test_drift_is_doubted():
    assert measurement.doubts_of_times("backward", [1.0, 1.0, 1.0, 1.0, 1.15, 1.15, 1.15, 1.15]) == (
        "backward times drift: median 1.00 ms in the first half of the passes, 1.15 ms in the second",
    )
    assert (
        measurement.doubts_of_times("backward", [1.0, 1.0, 5.0, 1.0, 1.0]) == ()
    )  # the one in the middle is in neither half


def test_too_few_passes_are_doubted(clock):
    assert timed(clock, [1.0] * 5, passes=3)["doubts"] == ("times of only 3 passes",)
    assert timed(clock, [1.0] * 3, passes=1)["doubts"] == ("times of only 1 pass",)


def test_a_busy_machine_is_doubted(clock, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.5, 0.0, 0.0))
    cores = len(os.sched_getaffinity(0))
    assert timed(clock, [1.0] * 10, passes=8)["doubts"] == (
        f"the machine was busy before the timing began: load average 99.5 on {cores} cores",
    )


def test_no_pass_begins_that_would_end_too_late(clock):
    measured = timed(clock, [400.0] * 20, passes=10, max_seconds=1.7)
    # Two warm-up passes, and two passes that end after 1.2 and 1.6 seconds.
    assert (measured["passes"], measured["forward_ms"], clock.now) == (2, 400.0, pytest.approx(1.6))
    assert measured["doubts"] == ("times of only 2 passes of the 10 asked for",)


def test_a_short_limit_leaves_fewer_warm_up_passes(clock):
    measured = timed(clock, [900.0, 700.0, 700.0], max_seconds=2)
    assert (measured["passes"], measured["forward_ms"]) == (1, 700.0)
    measured = timed(clock, [9000.0, 700.0], max_seconds=2)
    assert (measured["passes"], measured["forward_ms"]) == (1, 9000.0)
    assert measured["doubts"] == (
        "the time limit left no pass to warm up: the times include what a first call does once",
        "times of only 1 pass of the 10 asked for",
    )


# Other processes on the GPU.

LISTED = """GPU-1-2-3, 100, 512
GPU-1-2-3, 200, [N/A]
GPU-9-9-9, 300, 1024
"""


@pytest.fixture
def nvidia_smi(monkeypatch):
    """Sets the output of nvidia-smi on a machine where torch sees the GPU 1-2-3."""

    def says(text):
        done = machines.subprocess.CompletedProcess([], 0, text, "")
        monkeypatch.setattr(machines.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(machines.subprocess, "run", lambda command, **options: done)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        properties = type("Properties", (), {"uuid": "1-2-3"})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return machines.CudaMachine(0).sharing()

    return says


def test_other_processes_on_the_gpu_are_named(nvidia_smi, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 200)
    assert nvidia_smi(LISTED) == ("the GPU is shared with process 100 (512 MiB)",)
    monkeypatch.setattr(os, "getpid", lambda: 300)
    # This process is not in the GPU's list, so it runs in a container: one of the two processes is this one.
    assert nvidia_smi(LISTED) == ("the GPU is shared with 1 other process(es)",)


def test_alone_on_the_gpu_there_is_no_doubt(nvidia_smi, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 100)
    assert nvidia_smi("GPU-1-2-3, 100, 512\n") == ()
    assert nvidia_smi("GPU-1-2-3, 77, 512\n") == ()
    assert nvidia_smi("") == ()
    assert nvidia_smi("No devices were found\n") == ()


def test_nvidia_smi_may_be_absent_or_fail(nvidia_smi, monkeypatch):
    def fail(command, **options):
        raise machines.subprocess.CalledProcessError(9, command)

    nvidia_smi(LISTED)
    monkeypatch.setattr(machines.subprocess, "run", fail)
    assert machines.CudaMachine(0).sharing() == ()
    monkeypatch.setattr(machines.shutil, "which", lambda name: None)
    assert machines.CudaMachine(0).sharing() == ()
