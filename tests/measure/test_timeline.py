"""Timelines: events add up to the measured bytes and are named after the operators that allocated them."""

import itertools
import os
import threading
from operator import attrgetter

import pytest
import torch
from small_attention import N, S, heads, leaf, naive_attention
from torch.nn import functional

import memcheck
from memcheck._extension import _C
from memcheck.measure.recorders import NODE, allocated_by, stack_of
from memcheck.measure.timeline import record_timeline


def names(timeline, phase=None):
    return {event.name for event in timeline.events if phase in (None, event.phase)}


weight = leaf(2, 64, 64)
linear = torch.nn.Linear(7, 3)
CASES = {
    "naive attention": (naive_attention, heads, {}),
    "dense gradient": (naive_attention, heads, {"dense_grad": True}),
    "inference": (naive_attention, heads, {"backward": False}),
    "in place": (lambda x: x.clone().sin_().relu_(), lambda: (leaf(100),), {}),
    "two outputs": (lambda x: {"exp": x.exp(), "sin": [x.sin()]}, lambda: (leaf(100),), {}),
    "an input twice, and as output": (lambda x, y: (x, y), lambda: (leaf(100),) * 2, {}),
    "a number": (lambda x: x * 2.5, lambda: (leaf(100),), {}),
    "nothing": (lambda: None, lambda: (), {}),
    "module": (linear, lambda: (leaf(5, 7),), {}),
    "function transform": (torch.func.grad(lambda x: x.exp().sum()), lambda: (torch.randn(100),), {}),
    "softplus": (memcheck.softplus_attention, lambda: (leaf(2, 300, 16), leaf(2, 16, 300), leaf(2, 16, 300)), {}),
    "linear": (memcheck.linear_attention, lambda: [leaf(1, 2, 300, 16) for _ in range(3)], {"causal": True}),
    "compressed": (memcheck.compressed_attention, lambda: [leaf(1, 2, 300, 16) for _ in range(3)], {"factor": 8}),
    "combinator": (lambda x: memcheck.combinator(x, weight), lambda: (leaf(3, 40, 64),), {"parameters": [weight]}),
}


@pytest.mark.parametrize("name", CASES)
def test_events_add_up_to_what_is_measured(name):
    fn, inputs, options = CASES[name]
    inputs = inputs()
    if name == "function transform":
        fn(*inputs)  # the first call imports torch._dynamo, which keeps a number
    record = memcheck.measure_memory(fn, *inputs, **options)
    timeline = record_timeline(fn, *inputs, **options)
    peaks = {phase: timeline.alive[step] for phase, step in timeline.peak.items()}
    assert peaks["forward"] == record.forward_peak_bytes
    assert peaks.get("backward") == record.backward_peak_bytes
    for phase, peak in peaks.items():
        for top in (1, 3, 100):
            assert sum(row["bytes"] for row in timeline.alive_at_peak(phase, top)) == peak
    sums = itertools.accumulate((event.bytes for event in timeline.events), initial=timeline.alive[0])
    assert list(sums) == timeline.alive
    assert timeline.alive == [sum(block.bytes for block in timeline.alive_after(step)) for step in timeline.steps]
    assert sum(block.bytes for block in timeline.kept()) == record.saved_bytes
    assert [event.index for event in timeline.events] == timeline.steps[1:]
    assert timeline.phases[0][1] == 0
    assert timeline.phases[-1][2] == len(timeline.events)


def test_blocks_have_the_names_of_what_allocated_them():
    timeline = record_timeline(naive_attention, *heads())
    assert names(timeline, "forward") == {"aten::bmm", "aten::_softmax", "output (aten::bmm)"}
    assert {"SoftmaxBackward0", "BmmBackward0", "gradient of the output (aten::ones)"} <= names(timeline, "backward")
    rows = timeline.alive_at_peak("forward")
    assert [(row["name"], row["bytes"], row["shape"], row["dtype"]) for row in rows] == [
        ("aten::bmm", S, (6, 17, 17), "float32"),
        ("aten::_softmax", S, (2, 3, 17, 17), "float32"),
        ("input q", N, (2, 3, 17, 5), "float32"),
        ("input k", N, (2, 3, 17, 5), "float32"),
        ("input v", N, (2, 3, 17, 5), "float32"),
    ]
    gradients = {block.role for block in timeline.alive_after(timeline.steps[-1]) if block.phase == "backward"}
    assert gradients == {f"gradient of input {name}" for name in "qkv"}


def test_our_operators_have_their_names():
    timeline = record_timeline(memcheck.softplus_attention, leaf(2, 300, 16), leaf(2, 16, 300), leaf(2, 16, 300))
    assert "memcheck::softplus_attention" in names(timeline, "forward")
    assert "memcheck::softplus_attention_backward" in names(timeline, "backward")


def test_parameters_and_nested_arguments_have_names():
    timeline = record_timeline(linear, leaf(5, 7))
    assert [block.name for block in timeline.alive_after(0)] == ["input input", "parameter weight", "parameter bias"]
    timeline = record_timeline(lambda pair, **rest: pair["a"][0], {"a": [leaf(9)]}, b=leaf(8), parameters=[leaf(7)])
    assert [block.name for block in timeline.alive_after(0)] == ["input pair.a.0", "input b", "parameter 0"]
    timeline = record_timeline(torch.matmul, leaf(5, 7), leaf(7, 3))
    assert [block.name for block in timeline.alive_after(0)] == ["input 0", "input 1"]


def test_allocations_of_an_operators_threads_have_its_name():
    """The backward of the CPU's fused attention allocates scratch in its parallel loops."""
    q, k, v = (leaf(1, 4, 512, 32) for _ in range(3))
    timeline = record_timeline(functional.scaled_dot_product_attention, q, k, v)
    ours = [name for name in names(timeline, "backward") if not name.startswith("gradient")]
    assert "ScaledDotProductFlashAttentionForCpuBackward0" in ours
    assert all("attention" in name.lower() for name in ours), ours


def test_threads_of_the_user_have_their_own_operators():
    def in_a_thread(x):
        thread = threading.Thread(target=lambda: results.append(x.exp()))
        thread.start()
        thread.join()
        return results.pop().sin()

    results = []
    timeline = record_timeline(in_a_thread, torch.randn(100))
    assert [event.name for event in timeline.events] == ["aten::exp", "output (aten::sin)", "aten::exp"]


def test_ranges_and_factories_are_not_names():
    assert allocated_by(("aten::exp",)) == "aten::exp"
    assert (
        allocated_by(("my layer", "aten::reshape", "aten::clone", "aten::empty_like", "aten::empty")) == "aten::clone"
    )
    assert allocated_by(("aten::empty",)) == "aten::empty"
    assert allocated_by((NODE + "MulBackward0", "aten::mul")) == "MulBackward0"
    assert allocated_by((NODE + "torch::autograd::AccumulateGrad", "aten::clone")) == "AccumulateGrad"
    assert allocated_by((NODE + "torch::autograd::CppNode<a::B>", "a::b_backward", "aten::empty")) == "a::b_backward"
    assert allocated_by(()) == "no operator"


def test_blocks_from_before_are_counted_when_they_go():
    """A call that frees a cache of an earlier call leaves fewer bytes alive, also in the measurement."""
    cache = {}

    def cached(x):
        cache.clear()
        cache["last"] = x.exp()
        return x.sin()

    with memcheck.track():
        cached(torch.randn(100))
        record = memcheck.measure_memory(cached, torch.randn(100))
        timeline = record_timeline(cached, torch.randn(100))
    assert timeline.alive[timeline.peak["forward"]] == record.forward_peak_bytes == 1200 - 400
    assert [block.name for block in timeline.blocks if block.bytes < 0] == ["freed, from before"]
    assert sum(row["bytes"] for row in timeline.alive_at_peak("forward", 1)) == 800


def test_inputs_outputs_and_blocks_of_an_operator_are_summed():
    timeline = record_timeline(lambda x: [x.sin(), x.exp().exp().exp()], torch.randn(1000))
    sums = timeline.course.by(attrgetter("operator"))
    assert {name: (max(sizes), sizes[-1]) for name, sizes in sums.items()} == {
        "inputs": (4000, 4000),
        "outputs": (8000, 8000),
        "aten::exp": (8000, 0),
    }


@pytest.mark.isolated
def test_the_timeline_ends_when_memory_runs_out():
    q, k, v = heads()
    timeline = record_timeline(naive_attention, q, k, v, memory_limit=3 * N + S + 100)
    assert (timeline.record.status, [phase for phase, *_ in timeline.phases]) == ("oom", ["forward"])
    assert timeline.alive_at_peak("forward")[0]["name"] == "aten::bmm"
    timeline = record_timeline(naive_attention, q, k, v, memory_limit=3 * N + 2 * S)
    assert (timeline.record.oom_phase, [phase for phase, *_ in timeline.phases]) == (
        "backward",
        ["forward", "backward"],
    )


def test_errors_of_the_callable_end_the_recording():
    def broken(x):
        raise TypeError("no such luck")

    with pytest.raises(TypeError, match="no such luck"):
        record_timeline(broken, torch.randn(3))
    assert record_timeline(torch.exp, torch.randn(3)).alive == [12, 24]


def test_one_timeline_at_a_time():
    x = torch.randn(3)
    with pytest.raises(RuntimeError, match="recorded already"):
        record_timeline(lambda x: record_timeline(torch.exp, x), x)
    assert record_timeline(torch.exp, x).alive == [12, 24]


def test_events_are_recorded_only_between_begin_and_end():
    with memcheck.track():
        recording = _C.AllocationTimeline()
        kept = torch.empty(10)
        recording.close()
        more = torch.empty(20)
        assert len(recording) == 1
        [(address, size, path, _, _, tensor)] = recording.events()
    assert (address, size, tensor) == (kept.data_ptr(), kept.nbytes, ((10,), "float32"))
    assert recording.paths()[path] == (0, "aten::empty")
    assert more.nbytes == 80


def test_a_closed_timeline_changes_nothing_in_an_open_one():
    ledgers = [_C.PeakLedger(), _C.PeakLedger()]
    with memcheck.track():
        closed = _C.AllocationTimeline(ledgers[0])
        closed.set_module(3)
        early = torch.empty(10)
        closed.close()
        opened = _C.AllocationTimeline(ledgers[1])
        assert opened.set_module(1) == 0
        kept = torch.empty(20)
        assert closed.set_module(2) == 0
        closed.begin_step()
        for block in (early, kept):
            closed.set_kind(block.data_ptr(), 1, 2)
            closed.set_kind_like(block.data_ptr(), 1, early.data_ptr())
        outside = torch.empty(30)
        assert opened.set_module(0) == 1
        opened.begin_step()
        closed.end_step()
        inside = torch.empty(40)
        opened.end_step()
        opened.close()
    forward, step = 1, 3
    assert [ledger.steps for ledger in ledgers] == [0, 1]
    assert [[(site[2:], size) for site, size, _ in ledger.alive_at_peak()] for ledger in ledgers] == [
        [((3, forward, 0), early.nbytes)],
        [((1, forward, 0), kept.nbytes), ((1, forward, 0), outside.nbytes), ((0, step, 0), inside.nbytes)],
    ]


def test_shapes_are_those_of_whole_blocks():
    with memcheck.track():
        recording = _C.AllocationTimeline()
        kept = torch.zeros(4, 6, dtype=torch.bfloat16)[1:].t().double()
        recording.close()
    assert [tensor for _, size, _, _, _, tensor in recording.events() if size > 0] == [
        ((4, 6), "bfloat16"),
        ((6, 3), "float64"),
    ]
    assert kept.shape == (6, 3)


def test_events_of_many_threads_add_up():
    def work(size):
        for _ in range(300):
            torch.empty(size, dtype=torch.uint8)

    with memcheck.track() as memory:
        recording = _C.AllocationTimeline()
        threads = [threading.Thread(target=work, args=(size,)) for size in (100, 1000, 10_000, 100_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recording.close()
        sums = list(itertools.accumulate(size for _, size, *_ in recording.events()))
        assert max(sums) == memory.peak_bytes
    assert (len(sums), min(sums), sums[-1]) == (2400, 0, 0)


@pytest.mark.isolated
def test_a_fork_leaves_the_recording_to_the_parent():
    stop, everyone = threading.Event(), threading.Barrier(4)

    def churn():
        torch.empty(100)
        everyone.wait()
        while not stop.is_set():
            torch.empty(100)

    with memcheck.track():
        recording = _C.AllocationTimeline()
        threads = [threading.Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        # The first operator of a thread under a new callback takes a lock inside torch; the fork must come later.
        torch.empty(100)
        everyone.wait()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                torch.empty(100)
                inner = _C.AllocationTimeline()
                kept = torch.empty(100)
                os._exit(len(inner) != 1 or kept.numel() != 100)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert len(recording) > 0


# Traces of CUDA memory from torch.


def cpp(name):
    return {"name": name, "filename": "/torch/Operators.cpp", "line": 1}


def test_operators_are_found_in_cpp_tracebacks():
    frames = [
        cpp("at::detail::empty_cuda(c10::ArrayRef<long>)"),
        cpp("at::_ops::mul_Tensor::redispatch(c10::DispatchKeySet, at::Tensor const&, at::Tensor const&)"),
        cpp("at::_ops::mul_Tensor::call(at::Tensor const&, at::Tensor const&)"),
        cpp("torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)"),
        cpp("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"),
    ]
    assert stack_of(frames) == (NODE + "MulBackward0", "aten::mul")
    assert stack_of(frames[:3]) == ("aten::mul",)
    assert stack_of([cpp("at::_ops::_softmax::call(at::Tensor const&)")]) == ("aten::_softmax",)
    python = {"name": "forward", "filename": "/home/model.py", "line": 12}
    assert stack_of([cpp("cudaMalloc"), python]) == ("/home/model.py:12 forward",)
    assert stack_of([]) == ()
