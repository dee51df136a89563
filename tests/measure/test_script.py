"""Live bytes of a script by operator, module and line: the ledger, lines, modules and the optimizer."""

import random
import threading
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import checkpoint

from memcheck._extension import _C
from memcheck.core.script_record import Line
from memcheck.measure.script_watch import LEAST_BYTES, ScriptWatch

CPU = torch.device("cpu")
ROWS = 512


def line_of(comment):
    """Returns the number of the line in this file that ends with the comment."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)  # up's weights
        self.down = nn.Linear(128, 64)
        self.register_buffer("scale", torch.ones(4096))

    def forward(self, x):
        hidden = torch.tanh(self.up(x))  # up and tanh
        return self.down(hidden)  # down


def recorded(call, limit_bytes=None):
    """Returns the recording of call(), made while its result is alive."""
    with ScriptWatch(CPU, limit_bytes) as watch:
        error = kept = None
        try:
            kept = call()
        except torch.OutOfMemoryError as refused:
            error = refused
        error = error and error.with_traceback(None)
    record = watch.record(["test"], 0, error)
    assert record.peak.bytes == watch.tracker.peak_bytes
    assert sum(alive.bytes for alive in record.alive) == record.peak.bytes
    assert max(map(sum, record.course.states()), default=0) == record.peak.bytes
    assert not record.doubts
    assert max(course_of(record).items(), key=lambda point: sum(point[1].values()))[0] == record.peak.event
    assert course_of(record)[record.peak.event] == {each.place: each.bytes for each in record.alive}
    del kept
    return record


def course_of(record):
    """Event -> the places alive after it and their bytes. Of the same events, the last point counts."""
    sizes, found = {}, {}
    for point in record.course.points:
        sizes |= {record.course.places[place]: size for place, size in point.changes}
        found[point.event] = {place: size for place, size in sizes.items() if size}
    return found


def at_the_end(record):
    """The bytes of each layer at the last point."""
    sums = Counter()
    for place, size in zip(record.course.places, record.course.states()[-1], strict=True):
        sums[place.layer] += size
    return +sums


def sums_of(ledger):
    return [sum(np.frombuffer(sizes, np.int64).tolist()) for _, _, sizes in ledger.shots()]


def summed(alive, key):
    sums = Counter()
    for each in alive:
        sums[key(each.place)] += each.bytes
    return sums


def train(steps=2):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(ROWS, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # backward
        optimizer.step()  # step
    return model, optimizer, loss


def test_the_ledger_keeps_what_was_alive_at_the_first_highest_sum():
    generator = random.Random(0)
    for _ in range(30):
        ledger, alive, best, best_alive, levels = _C.PeakLedger(), {}, 0, {}, []
        for address in range(1, 300):
            if alive and generator.random() < 0.45:
                victim = generator.choice(list(alive))
                ledger.release(victim, alive.pop(victim)[0])
            elif alive and generator.random() < 0.2:
                other = generator.choice(list(alive))
                kind, module = generator.randrange(5), generator.randrange(3)
                ledger.set_kind(other, kind, module)
                size, (path, line, _, phase, _) = alive[other]
                alive[other] = size, (path, line, module, phase, kind)
                continue
            else:
                site = (*(generator.randrange(3) for _ in range(3)), generator.randrange(4), 0)
                alive[address] = generator.randrange(1, 100), site
                ledger.allocate(address, alive[address][0], *site)
            levels.append(sum(size for size, _ in alive.values()))
            if levels[-1] > best:
                best, best_alive = levels[-1], dict(alive)
        sums, blocks = Counter(), Counter()
        for size, site in best_alive.values():
            sums[site] += size
            blocks[site] += 1
        assert ledger.peak()[0] == best
        found = {site: (size, count) for site, size, count in ledger.alive_at_peak()}
        assert found == {site: (sums[site], blocks[site]) for site in sums}
        assert sums_of(ledger) == levels
        assert ledger.level == levels[-1]


def test_the_ledger_keeps_every_place_over_time():
    """At the first highest sum of each group of events, also where a block's kind was set between two events."""
    generator, ledger = random.Random(1), _C.PeakLedger()
    alive, states = {}, []
    for address in range(1, 3001):
        if len(alive) > 40:
            victim = generator.choice(list(alive))
            ledger.release(victim, alive.pop(victim)[0])
        else:
            site = (*(generator.randrange(3) for _ in range(3)), generator.randrange(4), 0)
            alive[address] = generator.randrange(1, 100), site
            ledger.allocate(address, alive[address][0], *site)
        sums = Counter()
        for size, site in alive.values():
            sums[site] += size
        states.append(dict(sums))
        other = generator.choice(list(alive))
        ledger.set_kind(other, kind := generator.randrange(5), None)
        alive[other] = alive[other][0], (*alive[other][1][:4], kind)
    shots, sites = ledger.shots(), ledger.sites()
    assert len(shots) == 375
    for number, (event, _, packed) in enumerate(shots):
        group = states[8 * number : 8 * number + 8]
        best = max(range(len(group)), key=lambda place: sum(group[place].values()))
        assert event == 8 * number + best + 1
        sizes = zip(sites, np.frombuffer(packed, np.int64).tolist(), strict=False)
        assert {site: size for site, size in sizes if size} == group[best]


def test_long_scripts_take_bounded_memory_and_keep_their_peak():
    ledger = _C.PeakLedger()
    highest = defaultdict(int)
    for turn in range(20_000):
        size = 1000 + turn % 777 if turn != 12_345 else 5000
        ledger.allocate(4096 + turn % 7, size, 0, 0, 0, 1, 0)
        highest[2 * turn] = size
        ledger.release(4096 + turn % 7, size)
    sums = sums_of(ledger)
    assert (ledger.events, ledger.peak()[:2]) == (40_000, (5000, 2 * 12_345 + 1))
    assert len(sums) <= 512
    assert max(sums) == 5000
    assert all(2 * 1000 > size >= 1000 or size == 5000 for size in sums)
    assert len(ledger.alive_at_peak()) == 1

    def loop():
        for turn in range(3000):
            with torch.profiler.record_function(f"range {turn}"):
                torch.empty(5000).exp_()

    with ScriptWatch(CPU) as watch:
        loop()
    record = watch.record(["test"], 0, None)
    assert record.events >= 6000
    assert len(record.course.points) <= 512
    assert len(watch._recorder.stacks()) < 10


def test_lines_modules_and_kinds_of_a_training_script():
    record = recorded(train)
    kinds = summed(record.alive, lambda place: place.kind)
    weights = sum(parameter.nbytes for parameter in Net().parameters())
    assert (kinds["parameters"], kinds["buffers"]) == (weights, 4 * 4096)
    # The peak is in the second step, before or after its gradients replace the first step's.
    assert kinds["optimizer state"] == 2 * weights + 4 * 4  # AdamW counts its steps in tensors.
    assert record.steps == 2
    assert record.peak.step == 2
    of_up = [alive for alive in record.alive if alive.place.module == "Net.up"]
    assert {alive.place.kind for alive in of_up} >= {"parameters", "optimizer state"}
    lines = {alive.place.line and alive.place.line.number for alive in of_up if alive.place.kind == "parameters"}
    assert line_of("up's weights") in lines
    state = [alive for alive in record.alive if alive.place.kind == "optimizer state" and alive.place.line]
    assert {alive.place.line for alive in state} == {Line(__file__, line_of("step"), "train")}
    assert {alive.place.module for alive in state} == {"Net.up", "Net.down"}
    assert record.phase_peaks["forward"] > 0
    assert record.phase_peaks["backward"] == record.peak.bytes
    assert record.phase_peaks["optimizer step"] > 0
    assert record.left_bytes > 3 * weights


def test_a_backward_has_the_lines_and_modules_of_its_forward():
    model, x = Net(), torch.randn(ROWS, 64)
    grown = torch.randn(ROWS, 64, requires_grad=True)

    def backward():
        model(x + grown).sum().backward()  # sum
        return grown.grad, [parameter.grad for parameter in model.parameters()]

    with ScriptWatch(CPU) as watch:
        kept = backward()
        watch._recorder.ledger.allocate(1, 2**30)  # The peak is at the end.
    alive = [each for each in watch.record(["test"], 0, None).alive if each.bytes < 2**30]
    gradients = {
        (each.place.operator, each.place.module, each.place.line.number): each.bytes
        for each in alive
        if each.place.kind == "gradients"
    }
    assert gradients == {
        # The autograd engine allocates sums of bias gradients; the gradient of x + grown is also that of x.
        ("AddmmBackward0", "Net.up", line_of("up and tanh")): (128 * 64 + 128 + ROWS * 64) * 4,
        ("AddmmBackward0", "Net.down", line_of("down")): (64 * 128 + 64) * 4,
    }
    assert sum(gradients.values()) == sum(tensor.nbytes for tensor in [kept[0], *kept[1]])


def test_gradients_that_are_copies_belong_to_their_modules():
    """The engine copies gradients under create_graph, and those that share memory with another."""
    model, x = Net(), torch.randn(ROWS, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of the cycle between a parameter and its gradient.
        record = recorded(lambda: (model(x).square().mean().backward(create_graph=True), torch.ones(2**22))[1])
    sums = summed(record.alive, lambda place: (place.kind, place.module))
    assert sums["gradients", "Net.up"] == (128 * 64 + 128) * 4
    assert sums["gradients", "Net.down"] == (64 * 128 + 64) * 4
    assert ("gradients", None) not in sums
    del model.up.weight.grad, model.up.bias.grad, model.down.weight.grad, model.down.bias.grad

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = (nn.Parameter(torch.ones(ROWS, 64)) for _ in range(2))

        def forward(self, x):
            return x * (self.left + self.right)

    both = nn.Sequential(Sum())
    record = recorded(lambda: (both(x).sum().backward(), torch.ones(2**22))[1])
    assert summed(record.alive, lambda place: (place.kind, place.module))["gradients", "Sequential.0"] == 2 * x.nbytes


def test_the_peak_is_named_by_a_block_that_has_a_line():
    """A scalar is often the last block at the peak, such as a loss, and has no line."""

    def loss():
        kept = torch.ones(1000, 1000)  # large
        freed = torch.ones(1024)
        del freed
        return kept, torch.empty(1000, dtype=torch.uint8), torch.ones(1000), torch.empty(())

    record = recorded(loss)
    assert record.peak.bytes == 4_000_000 + 1000 + 4000 + 4
    assert (record.peak.place.operator, record.peak.place.line.number) == ("aten::ones", line_of("large"))
    assert recorded(lambda: torch.ones(7)).peak.place.operator == "aten::ones"

    ledger = _C.PeakLedger(100)
    ledger.allocate(1, 100, 1)
    ledger.end_step()
    ledger.allocate(1, 200, 2)  # Its release was not seen.
    ledger.allocate(2, 10, 3)
    assert ledger.peak()[0] == 310
    assert ledger.peak()[3:] == (1, (2, 0, 0, 0, 0))
    ledger.release(1, 200)
    ledger.allocate(3, 500, 4)
    ledger.release(3, 500)
    for address in range(4, 100):
        ledger.allocate(address, 10, 5)
    assert ledger.peak()[3:] == (1, (5, 0, 0, 0, 0))


def test_a_checkpoint_that_runs_again_has_the_lines_of_its_forward():
    x = torch.randn(ROWS, 64, requires_grad=True)

    def work(x):
        return x.exp().sin()  # twice

    record = recorded(lambda: checkpoint(work, x, use_reentrant=False).sum().backward())
    assert record.peak.place.phase == "backward"
    again = [each for each in record.alive if each.place.operator == "aten::exp"]
    again += [each for each in record.alive if "SinBackward" in each.place.operator]
    assert {each.place.line.number for each in again} == {line_of("twice")}


def test_a_function_in_python_has_its_own_lines():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2  # in forward

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2  # in backward

    x = torch.randn(ROWS, 64, requires_grad=True)
    record = recorded(lambda: (Double.apply(x), torch.autograd.grad(Double.apply(x).sum(), x)))
    lines = {each.place.line.number for each in record.alive if each.place.line}
    assert {line_of("in forward"), line_of("in backward")} <= lines


def test_small_blocks_have_no_line_but_count():
    record = recorded(lambda: [torch.empty(LEAST_BYTES - 1, dtype=torch.uint8), torch.empty(7), torch.empty(2048)])
    assert [(each.bytes, each.blocks, bool(each.place.line)) for each in record.alive] == [
        (8192, 1, True),
        (LEAST_BYTES + 27, 2, False),
    ]


def test_out_of_memory_names_the_request_and_the_live_blocks():
    kept = []

    def fill():
        for _ in range(10):
            kept.append(torch.ones(1000, 100))  # filled

    record = recorded(fill, limit_bytes=1_000_000)
    assert record.ran_out
    assert record.refusals == 1
    assert record.refusal.requested_bytes == 400_000
    assert record.refusal.moment.bytes == 800_000 == sum(each.bytes for each in record.alive_then)
    assert record.refusal.moment.place.line.number == line_of("filled")
    assert {each.place.line.number for each in record.alive_then} == {line_of("filled")}
    assert course_of(record)[record.refusal.moment.event] == {each.place: each.bytes for each in record.alive_then}

    def recover():
        try:
            return torch.empty(10**6)
        except torch.OutOfMemoryError:
            return torch.empty(10**5)

    kept.clear()
    record = recorded(recover, limit_bytes=10**6)
    assert (record.refusals, record.ran_out, record.peak.bytes) == (1, False, 400_000)
    assert record.alive_then is record.alive


def test_each_thread_has_its_own_modules():
    class Wait(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def forward(self, both, kept):
            both.wait()
            kept.append(torch.ones(self.own))
            both.wait()

    class Other(Wait):
        pass

    both, kept = threading.Barrier(2), []

    def work():
        threads = [
            threading.Thread(target=kind(size), args=(both, kept)) for kind, size in ((Wait, 5000), (Other, 7000))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    record = recorded(work)
    assert summed(record.alive, lambda place: place.module) == {"Wait": 20_000, "Other": 28_000}
    assert {each.place.phase for each in record.alive} == {"forward"}


def test_recording_does_not_change_a_script():
    """Compiled regions are not split, modules need no hash, and a module that raises ends."""

    class Unhashable(nn.Module):
        __hash__ = None

        def forward(self, x):
            return x + 1

    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def work():
        with warnings.catch_warnings(record=True) as warned:
            torch.compile(Net(), backend=backend, fullgraph=True)(torch.randn(ROWS, 64))
        assert not warned
        Unhashable()(torch.ones(3))
        with pytest.raises(ValueError, match="no"):
            nn.Sequential(Failing())(torch.ones(3))
        return torch.ones(2000)

    record = recorded(work)
    assert len(graphs) == 1
    assert at_the_end(record)["from elsewhere"] >= 8000
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_parameter_registration_hooks
    assert not optimizer_hooks._global_optimizer_pre_hooks


def test_the_picture_shows_what_blocks_hold():
    weights = sum(parameter.nbytes for parameter in Net().parameters())
    with ScriptWatch(CPU) as watch:
        kept = train()
    assert at_the_end(watch.record(["test"], 0, None)) == {
        "parameters": weights,
        "buffers": 4 * 4096,
        "gradients": weights,
        "optimizer state": 2 * weights + 4 * 4,
        "from elsewhere": 4,  # The loss.
    }
    del kept


def test_what_is_alive_now_can_be_asked_by_any_thread():
    asked = []
    with ScriptWatch(CPU) as watch:
        assert watch.now()[:3] == ("step", 0, 0)
        train(steps=3)
        kept = torch.ones(200_000)  # the largest
        few = [torch.ones(5000) for _ in range(3)]
        thread = threading.Thread(target=lambda: asked.append(watch.now()))
        thread.start()
        thread.join()
        now = asked[0]
        assert (now.step_name, now.steps, now.line.number, now.line_bytes) == (
            "step",
            3,
            line_of("the largest"),
            800_000,
        )
        assert now.bytes == 800_000 + 3 * 20_000
        assert now.peak_bytes == watch.tracker.peak_bytes
        del kept
        assert watch.now().line_bytes < 800_000
        Net()(torch.ones(1, 64))
    assert watch.now() is None
    assert len(few) == 3


def test_what_is_alive_now_counts_calls_in_a_script_without_steps():
    with ScriptWatch(CPU) as watch:
        net = Net()
        for _ in range(3):
            net(torch.ones(1, 64))
        assert watch.now()[:2] == ("call of Net", 3)
