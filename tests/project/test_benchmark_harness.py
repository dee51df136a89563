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


def test_the_benchmark_of_sequences_runs_all_its_contenders(benchmark, monkeypatch):
    """All ways compute the same rows, and have the memory that their positions need."""
    module, milliseconds = benchmark("sequences"), benchmark("harness").milliseconds

    def once(setups, rounds, warmup):
        return {name: [milliseconds(pickle.loads(pickle.dumps(setup))())] * rounds for name, setup in setups.items()}

    monkeypatch.setattr(module, "time_apart", once)
    rows = module.measure_documents([5, 17, 2], 2, 4, 2) + module.measure_decay(2, 128, 4, 2)
    assert len(rows) == 2 * (4 + 4 + 6 + 4)
    assert all(row["ms"] > 0 and row["rounds"] == 2 for row in rows)
    peaks = {(row["operator"], row["what"], row["contender"]): row["peak_bytes"] for row in rows}
    for operator in ("softplus", "linear", "compressed"):
        assert peaks[operator, "forward", "packed"] < peaks[operator, "forward", "lengths"]


def test_the_contenders_of_the_benchmark_of_sequences_agree(benchmark):
    module, lengths = benchmark("sequences"), [5, 17, 2]
    for operator in ("softplus", "linear", "compressed"):
        along = 1 if operator == "softplus" else 2
        packed, inputs = module.contender(operator, "packed", lengths, 2, 4)
        looped, _ = module.contender(operator, "loop", lengths, 2, 4)
        torch.testing.assert_close(looped(*inputs), packed(*inputs))
        padded, inputs = module.contender(operator, "padded", lengths, 2, 4)
        with_lengths, _ = module.contender(operator, "lengths", lengths, 2, 4)
        for y, z, length in zip(padded(*inputs), with_lengths(*inputs), lengths, strict=True):
            torch.testing.assert_close(y.narrow(along - 1, 0, length), z.narrow(along - 1, 0, length))
    masked, inputs = module.contender("SDPA", "mask", lengths, 2, 4)
    for y, z, length in zip(masked(*inputs), module.OPERATORS["SDPA"](*inputs), lengths, strict=True):
        torch.testing.assert_close(y[:, :length], z[:, :length])
    inputs, decay = torch.randn(3, 1, 3, 192, 4, dtype=torch.float64), torch.tensor([0.2, 0.9, 1.0]).double()
    for other in (module.retention_in_a_loop, module.retention_batched):
        torch.testing.assert_close(other(*inputs, decay), module.ours(*inputs, decay), rtol=0, atol=1e-11)
