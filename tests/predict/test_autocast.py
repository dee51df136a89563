"""torch.autocast on meta tensors does what it does on the CPU, wherever a model enters it."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memcheck
from memcheck.bench.decoders import DecoderCase, predict_decoder
from memcheck.predict.autocast import LOWER, PROMOTE, WIDE_RESULT, autocast_followed, base_name, listed

pytestmark = pytest.mark.cpu
FIGURES = (
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes"),
)
FIGURES += ("forward_end_allocated_bytes", "backward_end_allocated_bytes")


@pytest.fixture(autouse=True)
def a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which takes numbers of 8 bytes
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "probes.jsonl"))


def zeros(x: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=x.device)


OURS = ("softplus_attention", "linear_r", "combinator")
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": lambda x, w: nn.functional.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "softmax": lambda x, w: torch.softmax(nn.functional.linear(x, w), -1),
    "silu": lambda x, w: nn.functional.silu(nn.functional.linear(x, w)) * x,
    "rms_norm": lambda x, w: nn.functional.rms_norm(x, (8,), w[0], 1e-5),
    "layer_norm": lambda x, w: nn.functional.layer_norm(nn.functional.linear(x, w), (8,), w[0]),
    "cat": lambda x, w: torch.cat([nn.functional.linear(x, w)] * 2, -1),
    "cat of two dtypes": lambda x, w: torch.cat([nn.functional.linear(x, w), x], -1),
    "stack of two dtypes": lambda x, w: torch.stack([nn.functional.linear(x, w), x]),
    "cross_entropy": lambda x, w: nn.functional.cross_entropy(nn.functional.linear(x, w).flatten(0, 1), zeros(x, 10)),
    "sdpa": lambda x, w: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([2], [0])),
    "einsum": lambda x, w: torch.einsum("bij,jk->bik", x, w),
    "prelu": lambda x, w: nn.functional.prelu(x, w[0, :1]),
    "fft": lambda x, w: torch.fft.rfft(nn.functional.linear(x, w)),
    "inverse": lambda x, w: torch.linalg.inv(nn.functional.linear(x, w)[:, :2, :2] + torch.eye(2, device=x.device)),
    "pad": lambda x, w: nn.functional.pad(nn.functional.linear(x, w), (1, 1), mode="reflect"),
    "prod": lambda x, w: nn.functional.linear(x, w).prod(-1),
    "sum": lambda x, w: nn.functional.linear(x, w).sum(-1),
    "norm": lambda x, w: torch.linalg.vector_norm(nn.functional.linear(x, w), dim=-1),
    "softplus_attention": lambda x, w: memcheck.softplus_attention(x, x.mT, x.mT),
    "linear_r": lambda x, w: memcheck.linear_r(x, w),
    "combinator": lambda x, w: memcheck.combinator(x, w.expand(2, 8, 8)),
}


class Dtypes(TorchDispatchMode):
    """The dtypes of the operands of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [part for part in args if isinstance(part, Tensor)]
        self.found.append((str(func), *(str(tensor.dtype) for tensor in tensors)))
        return func(*args, **(kwargs or {}))


@contextmanager
def on_meta(kind: str, dtype: torch.dtype, **how: Any) -> Iterator[None]:
    with autocast_followed(kind), torch.autocast(kind, dtype, **how):
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extension if name in OURS else ()) for name in FUNCTIONS]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_meta_is_autocast(name: str, dtype: torch.dtype) -> None:
    """The dtype of the result, what autograd recorded, and the casts in their order."""

    def result(device: str, context: AbstractContextManager[Any]) -> tuple[Any, ...]:
        torch.manual_seed(0)
        x, w = (torch.rand(*shape).to(device).requires_grad_() for shape in ((2, 5, 8), (8, 8)))
        with context, Dtypes() as dtypes:
            y = FUNCTIONS[name](x, w)
        casts = [words for words in dtypes.found if words[0] == "aten._to_copy.default"]
        # Without a target, attention on meta tensors is math.
        return (y.dtype,) if name == "sdpa" else (y.dtype, y.grad_fn and y.grad_fn.name(), casts)

    assert result("meta", on_meta("cpu", dtype)) == result("cpu", torch.autocast("cpu", dtype))


def kept_weights(**how: Any) -> list[int]:
    """The storages of w that two products save."""
    w = torch.ones(8, 8, device="meta", requires_grad=True)
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.detach()), lambda tensor: tensor)
    with on_meta("cpu", torch.bfloat16, **how), hooks:
        x = torch.ones(2, 8, device="meta", requires_grad=True)
        nn.functional.linear(nn.functional.linear(x, w), w)
    return [tensor.untyped_storage()._cdata for tensor in kept if tensor.numel() == 64]


def test_a_weight_is_cast_once() -> None:
    assert len(kept_weights()) == 2
    assert len(set(kept_weights())) == 1
    assert len(set(kept_weights(cache_enabled=False))) == 2


def test_autocast_of_a_gpu_that_is_not_here() -> None:
    x, w = (torch.ones(8, 8, device="meta", requires_grad=True) for _ in range(2))
    with on_meta("cuda", torch.float16):
        assert nn.functional.linear(x, w).dtype == torch.float16
        assert torch.softmax(nn.functional.linear(x, w), -1).dtype == torch.float32
        assert (nn.functional.linear(x, w) ** 2).dtype == torch.float32
        assert torch.tensordot(x, w, dims=1).dtype == torch.float32  # The widest of its operands.
        assert nn.functional.linear(x.double(), w.double()).dtype == torch.float64
        with torch.autocast("cuda", enabled=False):
            assert nn.functional.linear(x, w).dtype == torch.float32
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.extension
def test_the_tables_name_operators_that_are_cast() -> None:
    for kind in ("cpu", "cuda"):
        names = {base_name(op) for op in listed(kind)}
        tables = LOWER[kind] | PROMOTE[kind] | (WIDE_RESULT if kind == "cuda" else frozenset())
        assert tables <= names


class Casting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[torch.dtype, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point() and kwargs["dtype"] in SOURCES:
            self.found.add((args[0].dtype, kwargs["dtype"]))
        return func(*args, **(kwargs or {}))


SOURCES = (torch.float32, torch.bfloat16)
# The CPU's attention in math, which some samples take, goes back to float32.
BOTH_WAYS = {"scaled_dot_product_attention"}


@pytest.mark.ci
@pytest.mark.slow
def test_the_tables_of_the_cpu_are_what_torch_does() -> None:
    """torch's own sample inputs in either dtype, run under torch.autocast: the casts that happen."""
    from torch.testing._internal.common_methods_invocations import op_db

    names = {base_name(op) for op in listed("cpu")}
    seen = set()
    for info in op_db:
        own = info.name.replace("nn.functional.", "").replace(".", "_")
        name = own if own in names else info.aten_name
        if name not in names - BOTH_WAYS - PROMOTE["cpu"]:
            continue
        seen.add(name)
        casts = {cast for source in SOURCES for cast in casts_of(info, source)}
        wanted = (torch.float32, torch.bfloat16) if name in LOWER["cpu"] else (torch.bfloat16, torch.float32)
        assert casts <= {wanted}, name
    assert len(seen) > 70


def casts_of(info: Any, source: torch.dtype) -> set[tuple[torch.dtype, torch.dtype]]:
    found: set[tuple[torch.dtype, torch.dtype]] = set()
    for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 3):
        given = sample.transform(lambda x: x.to(source) if isinstance(x, Tensor) and x.dtype == torch.float32 else x)
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16), Casting() as casting:
            warnings.simplefilter("ignore")
            try:
                info.op(given.input, *given.args, **given.kwargs)
            except (RuntimeError, ValueError, NotImplementedError):  # Samples that the dtype does not allow.
                continue
        found |= casting.found
    return found


class Inside(nn.Module):
    """Enters autocast itself, leaves it for a part, and repeats a part."""

    def __init__(self, kind: str = "cpu", repeats: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.kind, self.repeats = kind, repeats

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.kind, torch.bfloat16):
            y = checkpoint(self.first, x, use_reentrant=False) if self.repeats else self.first(x)
            y = torch.softmax(self.norm(y), -1)
            with torch.autocast(self.kind, enabled=False):
                y = y.float() @ self.last.weight.t()
            return self.last(torch.cat([y, y], -1))


@pytest.mark.extension
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_a_model_with_autocast_inside_is_predicted_exactly(repeats: bool, optimizer: Any) -> None:
    model, x = Inside(repeats=repeats), torch.randn(16, 32)
    prediction = memcheck.predict_memory(model, x, optimizer=optimizer)
    measured = memcheck.measure_memory(model, x, optimizer=optimizer)
    assert prediction.exact, prediction.unknown
    named = FIGURES
    assert [getattr(prediction.record, name) for name in named] == [getattr(measured, name) for name in named]


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "set off": lambda: torch.set_grad_enabled(False),
    "not cached": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
# Modes of the first product, of the second, and so on; "/" ends the outermost autocast and begins another.
SEQUENCES = [" > ".join(modes) for modes in itertools.product(("grad", "no grad", "inference"), repeat=2)]
SEQUENCES += ["inference > no grad > inference > grad", "no grad > grad > inference"]
SEQUENCES += ["set off > grad", "grad, no grad > grad", "no grad, grad > no grad", "no grad / grad", "grad / no grad"]
SEQUENCES += [
    "not cached > grad",
    "no grad, not cached > grad",
    "no grad, autocast > grad",
    "inference, grad > no grad",
]


class InModes(nn.Module):
    """Products of two weights in a sequence of modes under autocast. Those made with gradients are added."""

    def __init__(self, sequence: str, trains: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(trains)
        self.regions = [[modes.split(", ") for modes in part.split(" > ")] for part in sequence.split(" / ")]

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for region in self.regions:
            with torch.autocast("cpu", torch.bfloat16):
                for modes in region:
                    with contextlib.ExitStack() as stack:
                        for mode in modes:
                            stack.enter_context(MODES[mode]())
                        made.append(self.second(self.first(x)))
        wanted = [y for y in made if y.requires_grad]
        return torch.stack(wanted or [y.clone() for y in made]).float().sum()


@pytest.mark.extension
@pytest.mark.parametrize("trains", [True, False])
def test_casts_that_modes_share_are_predicted_exactly(trains: bool) -> None:
    """A cast that is made without gradients is used with them; inference mode neither keeps nor uses one."""
    x = torch.randn(4, 64)
    for sequence in SEQUENCES:
        model = InModes(sequence, trains)
        prediction, measured = memcheck.predict_memory(model, x), memcheck.measure_memory(model, x)
        assert prediction.exact, (sequence, prediction.unknown)
        named = FIGURES
        predicted = {name: getattr(prediction.record, name) for name in named}
        assert predicted == {name: getattr(measured, name) for name in named}, sequence


def test_a_cast_made_without_gradients_had_none_in_torch_2_10() -> None:
    model, x = InModes("no grad > grad"), torch.randn(4, 64)
    kept = [memcheck.predict_memory(model, x, torch_version=version).record.saved_bytes for version in ("2.10", "2.11")]
    assert kept[0] == 0
    assert kept[1] is not None
    assert kept[1] > 0


@pytest.mark.extension
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_under_autocast_is_predicted_exactly(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
    how: dict[str, Any] = {"autocast": dtype, "optimizer": torch.optim.AdamW}
    prediction = memcheck.predict_memory(model, torch.randn(16, 32), **how)
    measured = memcheck.measure_memory(model, torch.randn(16, 32), **how)
    assert prediction.exact, prediction.unknown
    named = FIGURES
    assert [getattr(prediction.record, name) for name in named] == [getattr(measured, name) for name in named]


def test_autocast_inside_a_model_counts_on_a_gpu() -> None:
    x = torch.randn(16, 32)
    cast, plain = (memcheck.predict_memory(Inside(kind), x, device="H100-80GB").record for kind in ("cuda", "cpu"))
    assert cast.saved_bytes is not None
    assert plain.saved_bytes is not None
    assert cast.output_bytes == plain.output_bytes / 2


HALVES_TO_FLOAT: dict[str, tuple[str | None, Callable[[Tensor], Tensor]]] = {
    "softmax": (None, lambda x: nn.functional.softmax(x, -1, dtype=torch.float32)),
    "a method": (None, lambda x: x.log_softmax(dim=-1, dtype=torch.float32)),
    "softmax under autocast": ("float16", lambda x: torch.softmax(x, -1)),
}


@pytest.mark.parametrize("name", HALVES_TO_FLOAT)
def test_cuda_widens_a_softmax_of_float16_as_it_computes_it(name: str) -> None:
    """at::softmax copies other dtypes first, and float16 on the CPU."""
    autocast, function = HALVES_TO_FLOAT[name]

    def forward_peak(dtype: torch.dtype, device: str) -> int:
        x = torch.randn(64, 1024, dtype=dtype).requires_grad_()
        lower = None if autocast is None else dtype
        prediction = memcheck.predict_memory(function, x, device=device, autocast=lower, training=True)
        record = prediction.record
        assert record.forward_peak_bytes is not None
        return record.forward_peak_bytes

    with_copy = forward_peak(torch.bfloat16, "H200")
    assert with_copy - forward_peak(torch.float16, "H200") == 64 * 1024 * 4
    if autocast is None:
        assert forward_peak(torch.float16, "cpu") >= 64 * 1024 * 8


@pytest.mark.extension
def test_a_model_in_float16_takes_what_an_h200_measured() -> None:
    """The forward peak is the one that test_predictions_equal_measurements of tests/gpu measured with torch 2.11."""
    case = DecoderCase("tiny", "naive", bsz=2, context=256, autocast="float16", checkpointing=True)
    assert predict_decoder(case, "H200").forward_peak_bytes == 39_128_832
