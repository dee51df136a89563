"""Records of measurements against exact integers, computed by hand."""

import gc
import math
import re

import pytest
import torch
from small_attention import N as QUERY_BYTES
from small_attention import S, heads, leaf, naive_attention
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import memcheck
from memcheck.core.errors import UsageError
from memcheck.core.step import Step
from memcheck.measure.measurement import measure_memory, measure_time
from memcheck.measure.run import MeasuredCall, MeasuredRun
from memcheck.measure.timeline import record_timeline

BYTES = (
    "input_bytes",
    "output_bytes",
    "parameter_bytes",
    "forward_peak_bytes",
    "saved_bytes",
    "backward_peak_bytes",
    "gradient_bytes",
    "workspace_bytes",
)
T = QUERY_BYTES


def matmul(a, b):
    return a @ b


def in_place_chain(x):
    return x.clone().sin_().relu_()


def two_outputs(x):
    return {"exp": x.exp(), "sin": [x.sin()]}


def same(x):
    return x, x


# fn, inputs, keyword arguments, the bytes in the order of BYTES.
CASES = {
    # Backward copies the expanded gradient once, because the product needs other strides.
    "matmul": (matmul, lambda: (leaf(64, 32), leaf(32, 16)), {}, (10240, 4096, 0, 14336, 0, 28676, 10240, 4096)),
    "matmul, dense": (
        matmul,
        lambda: (leaf(64, 32), leaf(32, 16)),
        {"dense_grad": True},
        (10240, 4096, 0, 14336, 0, 14336 + 4096 + 10240, 10240, 0),
    ),
    "matmul, one constant": (
        matmul,
        lambda: (leaf(64, 32), torch.randn(32, 16)),
        {},
        (10240, 4096, 0, 14336, 0, 14336 + 4 + 4096 + 8192, 8192, 4096),
    ),
    "matmul, inference": (
        matmul,
        lambda: (leaf(64, 32), leaf(32, 16)),
        {"backward": False},
        (10240, 4096, 0, 14336, 0, None, None, 0),
    ),
    "matmul, nothing requires grad": (
        matmul,
        lambda: (torch.randn(64, 32), torch.randn(32, 16)),
        {},
        (10240, 4096, 0, 14336, 0, None, None, 0),
    ),
    # Scores and their softmax are alive at once; the softmax is saved. In backward, the gradients of the softmax, the
    # scores and v are alive too. The workspace is the rest, beside saved tensors and gradients.
    "naive attention": (
        naive_attention,
        heads,
        {},
        (3 * T, T, 0, 3 * T + 2 * S, S, 4 * T + S + 4 + T + 2 * S, 3 * T, 2 * S - 2 * T),
    ),
    "naive attention, dense": (
        naive_attention,
        heads,
        {"dense_grad": True},
        (3 * T, T, 0, 3 * T + 2 * S, S, 4 * T + S + T + T + 2 * S, 3 * T, 2 * S - 2 * T),
    ),
    "in-place chain": (in_place_chain, lambda: (leaf(100),), {}, (400, 400, 0, 1200, 400, 2404, 400, 800)),
    "output saved": (torch.exp, lambda: (leaf(100),), {}, (400, 400, 0, 800, 0, 1204, 400, 0)),
    "output aliases input": (lambda x: x.view(10, 10), lambda: (leaf(100),), {}, (400, 0, 0, 400, 0, 804, 400, 0)),
    # The gradient of the view becomes that of the input, and counts once. Backward of each sin holds the cosine, too.
    "a view beside work, dense": (
        lambda x, w: (x.view(10, 10), w.sin().sin()),
        lambda: (leaf(100), leaf(100)),
        {"dense_grad": True},
        (800, 400, 0, 1600, 400, 3200, 800, 400),
    ),
    # Backward of sin holds the cosine and its product. Each output has a gradient of one element.
    "two outputs": (two_outputs, lambda: (leaf(100),), {}, (400, 800, 0, 1200, 0, 2008, 400, 400)),
    "input is the output": (same, lambda: (leaf(100),), {}, (400, 0, 0, 400, 0, 804, 400, 0)),
    "integers": (
        lambda i, x: x[i],
        lambda: (torch.tensor([1, 2, 2]), leaf(10, 4)),
        {},
        (184, 48, 0, 232, 0, 396, 160, 0),
    ),
    "expanded input": (torch.exp, lambda: (leaf(1).detach().expand(100),), {}, (4, 400, 0, 404, 0, None, None, 0)),
    # A Python number becomes a tensor: a double, which is saved, and a float.
    "a Python number": (lambda x: x * 2.5, lambda: (leaf(100),), {}, (400, 400, 0, 812, 8, 1216, 400, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_exact(name):
    fn, inputs, options, expected = CASES[name]
    for _ in range(2):
        record = measure_memory(fn, *inputs(), **options)
        assert record.status == "ok"
        assert tuple(getattr(record, field) for field in BYTES) == expected


def test_a_tensor_given_twice_is_held_once():
    x = leaf(100)
    record = measure_memory(torch.mul, x, x)
    assert (record.input_bytes, record.output_bytes, record.saved_bytes, record.gradient_bytes) == (400, 400, 0, 400)


def test_keyword_and_nested_inputs_count():
    record = measure_memory(lambda pair, scale: pair[0] * scale, [leaf(10), leaf(20)], scale=leaf(10))
    assert record.input_bytes == 160
    assert record.gradient_bytes == 80


def test_parameters_of_modules_methods_and_closures():
    module = torch.nn.Linear(7, 3)
    x = torch.randn(5, 7)
    records = [
        measure_memory(module, x),
        measure_memory(module.forward, x),
        measure_memory(lambda x: module(x), x, parameters=module),
        measure_memory(lambda x: module(x), x, parameters=module.parameters()),
    ]
    assert {(record.input_bytes, record.parameter_bytes, record.gradient_bytes) for record in records} == {
        (140, 96, 96)
    }
    assert module.weight.grad is None


def conv_relu():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (matmul, lambda: (leaf(64, 32), leaf(32, 16))),
        (naive_attention, heads),
        (functional.scaled_dot_product_attention, heads),
        (conv_relu(), lambda: (leaf(2, 3, 12, 12),)),
        (torch.exp, lambda: (leaf(100),)),
        (in_place_chain, lambda: (leaf(100),)),
        (lambda x: functional.layer_norm(functional.gelu(x), (7,)).logsumexp(-1), lambda: (leaf(9, 7),)),
        (torch.nn.GRU(5, 6), lambda: (leaf(4, 2, 5),)),
    ],
)
def test_allocator_and_hooks_agree_on_saved_bytes(fn, inputs):
    run = MeasuredRun(MeasuredCall(Step(fn, inputs())), hooks=True)
    record = run.measure()
    assert record.saved_bytes == run.saved_by_hooks


def test_hooks_do_not_see_saved_numbers():
    """A Python number as operand becomes a tensor of 8 bytes, which autograd keeps without calling hooks."""
    run = MeasuredRun(MeasuredCall(Step(lambda q: torch.softmax(q / math.sqrt(5), -1), leaf(7))), hooks=True)
    assert run.measure().saved_bytes == 8
    assert run.saved_by_hooks == 0


def test_function_transforms_are_measured():
    transformed = torch.func.grad(lambda x: x.exp().sum())
    transformed(torch.randn(100))  # the first call imports torch._dynamo, which keeps a number
    record = measure_memory(transformed, torch.randn(100))
    assert (record.status, record.output_bytes, record.saved_bytes) == ("ok", 400, 0)


def test_gradients_of_the_user_are_put_back():
    x, weight = leaf(10), leaf(10)
    mine = x.grad = torch.full((10,), 7.0)
    record = measure_memory(lambda x: x * weight, x, parameters=[weight])
    assert x.grad is mine
    assert mine.eq(7).all()
    assert weight.grad is None
    assert record.gradient_bytes == 80


def test_measuring_inside_a_tracker():
    with memcheck.track() as memory:
        record = measure_memory(torch.exp, leaf(100), backward=False)
        assert memory.current_bytes == 0
        assert memory.peak_bytes == 800
    assert record.forward_peak_bytes == 800


def test_a_record_says_where_it_was_made():
    record = measure_memory(torch.exp, leaf(3))
    assert (record.device, record.device_index, record.mode) == ("cpu", None, "train")
    assert record.device_name
    assert record.device_total_bytes > record.device_free_bytes > 0
    assert record.torch_version == torch.__version__
    assert record.threads == torch.get_num_threads()
    assert record.allocator == "memcheck tracking allocator"
    assert record.library_workspace_bytes is None
    assert record.forward_max_allocated_bytes is None


@pytest.mark.isolated
def test_out_of_memory_in_forward():
    q, k, v = heads()
    limit = 3 * T + S + 100
    record = measure_memory(naive_attention, q, k, v, memory_limit=limit)
    assert (record.status, record.oom_phase) == ("oom", "forward")
    assert (record.oom_requested_bytes, record.oom_in_use_bytes) == (S, 3 * T + S)
    assert record.reason == (
        f"memcheck: tried to allocate {S} bytes with {3 * T + S} bytes in use, over the budget of {limit} bytes"
    )
    assert (record.input_bytes, record.forward_peak_bytes, record.backward_peak_bytes) == (3 * T, None, None)


@pytest.mark.isolated
def test_out_of_memory_in_backward():
    q, k, v = heads()
    record = measure_memory(naive_attention, q, k, v, memory_limit=3 * T + 2 * S)
    assert (record.status, record.oom_phase) == ("oom", "backward")
    assert (record.forward_peak_bytes, record.saved_bytes) == (3 * T + 2 * S, S)
    assert record.oom_requested_bytes + record.oom_in_use_bytes > 3 * T + 2 * S
    assert record.backward_peak_bytes is None
    assert q.grad is None


@pytest.mark.isolated
def test_the_peak_is_the_smallest_budget_that_suffices():
    peak = measure_memory(naive_attention, *heads()).backward_peak_bytes
    assert measure_memory(naive_attention, *heads(), memory_limit=peak).status == "ok"
    assert measure_memory(naive_attention, *heads(), memory_limit=peak - 1).status == "oom"


@pytest.mark.isolated
def test_nothing_outlives_running_out_of_memory():
    gc.disable()
    q, k, v = heads()
    with memcheck.track() as memory:
        for limit in (3 * T + S + 100, 3 * T + 2 * S):
            assert measure_memory(naive_attention, q, k, v, memory_limit=limit).status == "oom"
            assert memory.current_bytes == 0


def test_errors_of_the_callable_are_its_own():
    def broken(x):
        raise TypeError("no such luck")

    x = leaf(3)
    x.grad = torch.ones(3)
    with pytest.raises(TypeError, match="no such luck"):
        measure_memory(broken, x)
    assert x.grad.sum() == 3
    assert gc.isenabled()


def test_bad_arguments_are_named():
    """core/test_arguments.py and core/test_step.py have those of every step."""
    with pytest.raises(ValueError, match="inputs must be leaves"):
        measure_memory(torch.exp, leaf(3).exp())
    for name, wrong, least in (("passes", 0, 1), ("warmup", -1, 0), ("max_seconds", -2, 0)):
        with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {wrong}"):
            measure_time(torch.exp, leaf(3), **{name: wrong})


def meta(*shape):
    return torch.randn(*shape, device="meta", requires_grad=True)


def fake(*shape):
    with FakeTensorMode():
        return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("kind", [meta, fake])
def test_tensors_without_data_are_refused_by_name(kind):
    """Meta tensors would count as 0 bytes."""
    x, real = kind(3, 4), leaf(3, 4)
    name = kind.__name__
    told = re.escape(f"must have data to be measured, got a {name} tensor of shape (3, 4); memcheck.predict_memory")
    for measure in (measure_memory, measure_time, record_timeline):
        with pytest.raises(ValueError, match=f"^input mask.0 {told}"):
            measure(lambda x, mask: x, real, mask=[x])
        with pytest.raises(ValueError, match=f"^parameter weight {told}"):
            measure(torch.exp, real, parameters={"weight": x})
    with pytest.raises(ValueError, match=f"^output pair.1 {told}"):
        measure_memory(lambda real: {"pair": (real, x)}, real)
    with pytest.raises(ValueError, match=f"^held argument 1.0 {told}"):
        memcheck.track(real, [x])
    with memcheck.track() as memory, pytest.raises(ValueError, match=f"^held argument 0 {told}"):
        memory.hold(x)


N = 4000  # bytes of each tensor below
PEAKS = ("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes")


def weights():
    return torch.ones(1000, requires_grad=True)


def stepping(make_step, parameters=None, **more):
    """The record of y = x w with a step of AdamW: its own, or the one that make_step returns."""
    weight = weights()
    optimizer = torch.optim.AdamW([weight], foreach=False)
    step = optimizer.step if make_step is None else make_step(optimizer)
    named = {"parameters": weight} if parameters is None else {"parameters": parameters(optimizer)}
    return measure_memory(lambda x: x * weight, torch.ones(1000), **named, optimizer_step=step, **more), weight


def set_to_zero(optimizer):
    def step():
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def step_once(optimizer):
    [weight] = optimizer.param_groups[0]["params"]
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    weight.grad = None


def after_a_step(optimizer):
    step_once(optimizer)
    return optimizer.step


def scheduled(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer.step


def itself(optimizer):
    return optimizer


# The second step holds weight and input, two moments and a count; then the output; then the gradient and, until the
# backward ends, the element of the incoming gradient. AdamW's step allocates two tensors as large as the weight, a
# double and a float.
STATE = 2 * N + 4
STEADY = (3 * N + STATE, 4 * N + STATE + 4, 6 * N + STATE + 12)


@pytest.mark.parametrize(
    ("make_step", "parameters"),
    [
        (None, None),
        (None, itself),
        (None, lambda optimizer: ()),
        (after_a_step, None),
        (lambda optimizer: lambda: optimizer.step(), None),
        (lambda optimizer: lambda: optimizer.step(), itself),
        (scheduled, None),
    ],
)
def test_the_state_of_an_optimizer_is_alive_in_every_phase(make_step, parameters):
    record, weight = stepping(make_step, parameters)
    assert (record.input_bytes, record.parameter_bytes, record.optimizer_bytes) == (N, N, STATE)
    assert tuple(getattr(record, name) for name in PEAKS) == STEADY
    assert (record.output_bytes, record.saved_bytes, record.gradient_bytes, record.workspace_bytes) == (N, 0, N, 0)
    assert record.doubts == ()
    assert weight.grad is None


def test_gradients_are_alive_as_the_step_leaves_them():
    """zero_grad(set_to_none=False) keeps the gradients, and new ones are added to them."""
    record, _ = stepping(set_to_zero)
    forward, backward, optimizer = STEADY
    assert tuple(getattr(record, name) for name in PEAKS) == (forward + N, backward + N, optimizer)
    assert (record.gradient_bytes, record.saved_bytes, record.optimizer_bytes) == (N, 0, STATE)


def test_the_number_of_optimizer_steps():
    """The step runs twice if the optimizer has no state, else once; each pass for details runs it once more."""
    weight = weights()
    optimizer = torch.optim.AdamW([weight])
    counts = []
    for details in (False, False, True):
        measure_memory(lambda x: x * weight, torch.ones(1000), optimizer_step=optimizer.step, details=details)
        counts.append(int(optimizer.state[weight]["step"]))
    assert counts == [2, 3, 6]


def test_state_that_cannot_be_found_is_a_doubt():
    weight = weights()
    optimizer = torch.optim.AdamW([weight])
    step_once(optimizer)
    call = {"optimizer_step": lambda: optimizer.step()}
    record = measure_memory(lambda x: x * weight, torch.ones(1000), parameters=weight, **call)
    assert record.optimizer_bytes == 0
    [doubt] = record.doubts
    assert doubt.startswith("optimizer_step is not the step of a torch.optim.Optimizer, and made no state")
    record = measure_memory(lambda x: x * weight, torch.ones(1000), parameters=[weight, optimizer], **call)
    assert (record.parameter_bytes, record.optimizer_bytes, record.doubts) == (N, STATE, ())


@pytest.mark.parametrize("make_step", [None, lambda optimizer: lambda: optimizer.step(), set_to_zero])
def test_what_is_alive_at_the_peaks_adds_up_with_an_optimizer(make_step):
    record, _ = stepping(make_step, details=True)
    assert record.doubts == ()
    for name in PEAKS:
        rows = [row for row in record.alive_at_peak if row["phase"] == name.partition("_")[0]]
        assert sum(row["bytes"] for row in rows) == getattr(record, name)
    names = {row["name"] for row in record.alive_at_peak}
    assert ("left by the first step" in names) != ("optimizer state 0.exp_avg" in names)


@pytest.mark.isolated
def test_the_peak_with_an_optimizer_is_the_smallest_budget_that_suffices():
    peak = stepping(None)[0].optimizer_peak_bytes
    assert stepping(None, memory_limit=peak)[0].status == "ok"
    for limit, phase in ((peak - 1, "optimizer"), (4 * N, "backward"), (3 * N - 1, "forward")):
        record, weight = stepping(None, memory_limit=limit, details=True)
        assert (record.status, record.oom_phase) == ("oom", phase)
        assert weight.grad is None


def test_parameters_are_tensors_modules_or_optimizers():
    weight = weights()
    optimizer = torch.optim.AdamW([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    record = measure_memory(lambda x: x * weight, torch.ones(1000), parameters=optimizer)
    assert (record.parameter_bytes, record.optimizer_bytes, record.gradient_bytes) == (N, 0, N)
    assert weight.grad is None
    for wrong, name in ((3, "parameters"), ([weight, scheduler], "parameters.1"), ({"a": [len]}, "parameters.a.0")):
        with pytest.raises(ValueError, match=rf"^{name} must be a tensor, a module, an optimizer or a container"):
            measure_memory(lambda x: x * weight, torch.ones(1000), parameters=wrong)


@pytest.mark.parametrize(
    ("fn", "inputs", "why"),
    [
        (torch.exp, lambda: (torch.ones(3),), "no input or parameter requires grad"),
        (lambda x: x.detach().exp(), lambda: (leaf(3),), "no output requires grad, though input x does"),
        (lambda x: None, lambda: (leaf(3),), "fn returned no tensor"),
    ],
)
def test_that_no_backward_ran_is_a_doubt(fn, inputs, why):
    record = measure_memory(fn, *inputs())
    assert (record.mode, record.status, record.backward_peak_bytes) == ("train", "ok", None)
    assert record.doubts == (f"no backward ran: {why}",)
    assert measure_memory(fn, *inputs(), backward=False).doubts == ()


def test_times_have_medians_and_quartiles():
    calls = []
    x = leaf(10)
    times = measure_time(lambda x: calls.append(x) or x.exp(), x, warmup=3, passes=4)
    assert (len(calls), times["passes"]) == (7, 4)
    for phase in ("forward_ms", "backward_ms"):
        low, high = times[f"{phase}_quartiles"]
        assert 0 < low <= times[phase] <= high
    assert x.grad is None


def test_one_pass_is_always_timed():
    calls = []
    times = measure_time(lambda x: calls.append(x) or x.exp(), leaf(10), max_seconds=0)
    assert (len(calls), times["passes"]) == (1, 1)
    assert times["forward_ms_quartiles"] == (times["forward_ms"], times["forward_ms"])


def test_times_without_backward():
    times = measure_time(lambda x: x.exp(), leaf(10), backward=False, passes=2)
    assert (times["backward_ms"], times["backward_ms_quartiles"]) == (None, None)


def test_training_is_measured_under_no_grad_too():
    with torch.no_grad():
        record = measure_memory(torch.exp, torch.ones(10, requires_grad=True))
    assert record.mode == "train"
    assert record.gradient_bytes == 40


def test_no_backward_under_inference_mode():
    with torch.inference_mode(), pytest.raises(ValueError, match="backward must be False under torch"):
        measure_memory(torch.exp, torch.ones(10))


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_a_failed_backward_does_not_affect_the_next(share: float) -> None:
    """After a failure, autograd's queue holds the gradients of branches that were not reached."""

    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x * i).repeat(8 if i == 6 else 1, 1).exp().sum() for i in range(8)]).sum()

    x = torch.randn(64, 64, requires_grad=True)
    alone, all_of_it = measure_memory(torch.sin, x), measure_memory(branches, x)
    assert all_of_it.backward_peak_bytes is not None
    failed = measure_memory(branches, x, memory_limit=int(share * all_of_it.backward_peak_bytes))
    assert failed.status == "oom"
    after = measure_memory(torch.sin, x)
    assert (after.forward_peak_bytes, after.backward_peak_bytes) == (
        alone.forward_peak_bytes,
        alone.backward_peak_bytes,
    )


def test_casts_of_an_autocast_inside_do_not_outlive_it() -> None:
    """The loss is computed when the cast of the weight, which nothing keeps, is gone."""
    weight = torch.randn(256, 256, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return torch.nn.functional.linear(x, weight).float()

    alive: list[int] = []

    def loss(y: torch.Tensor) -> torch.Tensor:
        alive.append(tracker.current_bytes)
        return y.sum()

    with memcheck.track() as tracker:
        memcheck.measure_memory(model, torch.randn(1, 256), parameters=[weight], loss=loss, backward=False)
    assert max(alive) < weight.nbytes // 2


@pytest.mark.extension
def test_what_is_allocated_at_the_ends_of_the_phases():
    """The gradient that the backward starts from is gone by its end, unless it is the gradient of an input."""
    x = leaf(64, 32)
    record = measure_memory(torch.exp, x)
    assert record.forward_end_allocated_bytes == x.nbytes + record.output_bytes
    assert record.backward_end_allocated_bytes == 3 * x.nbytes
    dense = measure_memory(lambda x: x.view(-1), x, dense_grad=True)
    assert dense.backward_end_allocated_bytes == dense.backward_peak_bytes == 2 * x.nbytes
    assert measure_memory(torch.exp, x, backward=False).backward_end_allocated_bytes is None


def bytes_of(record):
    return [getattr(record, name) for name in BYTES]


class Physics(nn.Module):
    """Its input begins to require grad in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.requires_grad_()).tanh().sum()


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_gradients_are_those_of_all_that_the_backward_reaches(optimizer: str | None) -> None:
    model, x = Physics(), torch.randn(256, 8)
    first = memcheck.measure_memory(model, x, optimizer=optimizer)
    assert first.gradient_bytes == x.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    assert x.grad is None
    assert not x.requires_grad
    assert bytes_of(memcheck.measure_memory(model, x, optimizer=optimizer)) == bytes_of(first)
    predicted = memcheck.predict_memory(model, x, optimizer=optimizer, device="cpu")
    for name in ("forward_peak_bytes", "backward_peak_bytes", "gradient_bytes", "saved_bytes"):
        assert getattr(predicted.record, name) == getattr(first, name), name
    assert sum(predicted.terms["gradient_bytes"].values()) == first.gradient_bytes


def test_a_closure_is_measured_twice_alike() -> None:
    inner, x = nn.Linear(8, 8), torch.randn(4, 8)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return inner(x).relu().sum()

    first = memcheck.measure_memory(forward, x)
    assert first.gradient_bytes == 8 * 8 * 4 + 8 * 4
    assert inner.weight.grad is None
    assert bytes_of(memcheck.measure_memory(forward, x)) == bytes_of(first)
    assert memcheck.predict_memory(forward, x, device="cpu").record.gradient_bytes == first.gradient_bytes


@pytest.mark.parametrize("enable_grad", [False, True])
def test_a_graph_without_a_backward(enable_grad: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
    how = {"backward": False, "enable_grad": enable_grad}
    measured, predicted = (
        memcheck.measure_memory(model, x, **how),
        memcheck.predict_memory(model, x, device="cpu", **how),
    )
    kept = memcheck.measure_memory(model, x).saved_bytes if enable_grad else 0
    assert measured.saved_bytes == predicted.record.saved_bytes == kept
    assert measured.backward_peak_bytes is predicted.record.backward_peak_bytes is None
    assert not measured.doubts
    with pytest.raises(UsageError, match="enable_grad is for backward=False"):
        memcheck.measure_memory(model, x, enable_grad=True)
