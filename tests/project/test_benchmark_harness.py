"""How the CPU benchmarks time their contenders, and that each benchmark runs."""

import functools
import os
import pickle
import statistics

import pytest
import torch

SMALL = {  # the arguments of measure, but dtype and rounds
    "softplus_attention": (1, 5, 3),
    "linear_attention": (1, 2, 33, 3),
    "compressed_attention": ((1, 2, 16, 3), 4),
    "combinator": (1, 5, 4),
}
KINDS = {"softplus_attention": 8, "linear_attention": 16, "compressed_attention": 6, "combinator": 4, "projection": 2}


@pytest.fixture
def harness(benchmark, monkeypatch):
    module = benchmark("harness")
    monkeypatch.setattr(module, "PAUSE", 0.0)
    return module


def setup(source):
    """What makes a run of it, and pickles."""
    return functools.partial(eval, f"lambda: {source}")


def test_contenders_take_turns_in_another_order_each_round(harness):
    calls = []
    turns = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "abc"}
    times = harness.take_turns(turns, rounds=3, warmup=1)
    assert "".join(calls) == "cab" + "abc" + "bca" + "cab"
    assert times == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


def test_a_contender_has_a_process_of_its_own_with_the_environment_and_threads_asked_for(harness):
    fine = f"__import__('os').getpid() != {os.getpid()} and __import__('os').environ['MEMCHECK_TEST'] == 'yes'"
    threads = f"__import__('torch').get_num_threads() == {torch.get_num_threads()}"
    seeded = "__import__('torch').initial_seed() == 0"
    setups = {"one": setup(f"1 / ({fine} and {threads} and {seeded})"), "slow": setup("__import__('time').sleep(0.02)")}
    times = harness.time_apart(setups, rounds=2, warmup=0, environment={"MEMCHECK_TEST": "yes"})
    assert "MEMCHECK_TEST" not in os.environ
    assert [len(times[name]) for name in setups] == [2, 2]
    assert statistics.median(times["slow"]) > 20 > statistics.median(times["one"])


def test_a_contender_that_fails_says_why(harness):
    for broken in (functools.partial(eval, "1 / 0"), setup("1 / 0")):
        with pytest.raises(ZeroDivisionError):
            harness.time_apart({"broken": broken}, rounds=1)


@pytest.mark.parametrize("name", KINDS)
def test_every_benchmark_runs_all_its_contenders(benchmark, monkeypatch, name):
    def once(setups, rounds, environment=None):
        runs = {contender: pickle.loads(pickle.dumps(setup))() for contender, setup in setups.items()}
        return {contender: [milliseconds(run)] * rounds for contender, run in runs.items()}

    milliseconds = benchmark("harness").milliseconds
    module = benchmark(name)
    monkeypatch.setattr(module, "time_apart", once)
    if name == "softplus_attention":
        monkeypatch.setitem(module.ATTENTIONS, "compiled", module.plain)
    if name == "projection":
        rows = [row for operator in ("linear_r", "linear_l") for row in module.measure(operator, 1, 5, 4, 3, 2)]
    else:
        rows = [row for dtype in module.DTYPES for row in module.measure(*SMALL[name], dtype, 2)]
    kinds = {tuple(str(row.get(key)) for key in ("dtype", "mask", "what", "memory", "operator")) for row in rows}
    assert len(kinds) == KINDS[name]
    assert all(row["ms"] > 0 and row["rounds"] == 2 for row in rows)


def test_limits_of_the_machine_are_contenders(harness):
    """A copy and a matrix product of the same bytes and operations, and the rates of all contenders."""
    inputs = [torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(2, dtype=torch.bfloat16)]
    work = harness.Work.of_pass("forward + backward", inputs, 16, {"forward + backward": 2**23})
    assert work == harness.Work(2 * (3 * 34 + 2 * 16), 2**23)
    assert harness.Work.of_pass("forward", inputs, 16) == harness.Work(2 * (34 + 16))
    assert {name: setup()().shape for name, setup in work.limits(torch.float32).items()} == {
        "copy": (work.moved_bytes // 2,),
        "product": (4, 1024),
    }
    assert list(harness.Work(10).limits(torch.float32)) == ["copy"]
    rows = harness.compare({"memcheck": [2.0, 2.0], "copy": [1.0, 1.0]}, "memcheck", harness.Work(4 * 10**6, 6 * 10**6))
    assert [(row["ratio"], row["gb_per_s"], row["gflop_per_s"]) for row in rows] == [(1.0, 2.0, 3.0), (0.5, 4.0, 6.0)]
