"""Predictions equal measurements to the byte on the CPU. tests/published compares published figures of GPUs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch._dynamo  # predictions load it; loaded here, conftest.py freezes it with the other modules

import memcheck
from memcheck import predict_memory
from memcheck.allocator import MIB
from memcheck.bench.case_predictions import closed_bytes, prepare, traced
from memcheck.bench.catalog import CONTENDERS, Case, attention_types, combinator_types, make_case, make_combinator_case
from memcheck.core.devices import NEWEST_TRIED, Device, running
from memcheck.core.errors import UsageError
from memcheck.core.prediction import Prediction
from memcheck.core.record import Record
from memcheck.core.workload import Workload
from memcheck.measure.measurement import measure_memory
from memcheck.measure.tracker import track
from memcheck.predict.scratch import Target
from memcheck.predict.trace_runner import TraceRunner

scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention

pytestmark = pytest.mark.cpu

FIGURES = (
    "input_bytes",
    "output_bytes",
    "parameter_bytes",
    "forward_peak_bytes",
    "saved_bytes",
    "backward_peak_bytes",
    "gradient_bytes",
    "workspace_bytes",
)
FIGURES += ("forward_end_allocated_bytes", "backward_end_allocated_bytes")
# bsz, query_len, kv_len, dim, heads
SHAPES = [(2, 33, 33, 48, 3), (1, 16, 40, 32, 1), (3, 9, 5, 12, 3), (2, 1, 1, 8, 2)]
# Further shapes, for operators that split long sequences or lay out a single key.
SPLIT = {
    "softplus": [(2, 300, 700, 12, 1), (17, 700, 700, 33, 1), (17, 700, 300, 33, 1)],
    "linear": [(1, 300, 1300, 12, 3), (5, 300, 700, 40, 5), (1, 1, 1, 1, 1)],
    "combinator": [(1, 1, 1, 1, 1), (2, 63, 63, 129, 1), (16, 512, 512, 256, 1), (40, 700, 700, 33, 1)],
    "compressed": [(2, 300, 700, 120, 3), (2, 700, 300, 120, 3), (2, 1, 100, 120, 3)],
    "naive": [(2, 63, 65, 12, 3), (2, 16, 40, 384, 3), (2, 40, 16, 384, 3), (2, 1, 1, 384, 3)],
    "memcheck-pyt/naive": [(bsz, query_len, 1, 8, heads) for bsz in (1, 2) for query_len in (1, 5) for heads in (1, 2)],
}
SPLIT["linear-causal"], SPLIT["combinator-low-memory"] = SPLIT["linear"], SPLIT["combinator"]
SPLIT["cs336/naive"] = SPLIT["memcheck-pyt/naive"]
FACTORS = {300: 4, 700: 1, 1: 3}  # of compressed attention, by the number of queries; default otherwise
DTYPES = ("float32", "float64", "float16", "bfloat16")
EAGER = [name for name, contender in CONTENDERS.items() if not contender.compiled]
REFUSED = {"softmax/efficient", "softmax/cudnn"}  # not available on the CPU


def case_of(operator: str, **fields: object) -> Case:
    """Returns a case of any contender, with those sizes that it has."""
    sizes = {"bsz": 2, "query_len": 9, "kv_len": 9, "dim": 12, "heads": 3, "core_dim": None, "factor": None, **fields}
    if operator in combinator_types():
        wanted = ("bsz", "query_len", "dim", "dtype", "mode")
        return make_combinator_case(operator, **{name: sizes[name] for name in wanted if name in sizes})
    return make_case(operator, **sizes)


def cells(operator: str, further: Sequence[tuple[int, ...]] = ()) -> Iterator[tuple[Case, bool]]:
    """Yields cases of different shapes, dtypes, modes and masks, each once, and whether the gradient is dense."""
    found: dict[tuple[Case, bool], None] = {}
    shapes = [*SHAPES, *further]
    for shape, dtype, mode, causal in itertools.product(
        shapes, DTYPES, ("train", "inference", "decode"), (True, False)
    ):
        if mode == "decode" and CONTENDERS[operator].decode is None:
            continue
        if dtype == "bfloat16" and shape in SHAPES[1:]:
            continue
        sizes = dict(zip(("bsz", "query_len", "kv_len", "dim", "heads"), shape, strict=True))
        try:
            factor = FACTORS.get(shape[1]) if shape not in SHAPES else None
            case = case_of(operator, **sizes, factor=factor, dtype=dtype, mode=mode, causal=causal)
        except UsageError:  # a mask needs at least as many keys as queries
            continue
        found[case, mode == "train" and dtype == "float16"] = None
    return iter(found)


def measured(case: Case, dense_grad: bool = False, limit_bytes: int | None = None) -> Record:
    workload = prepare(case)
    return measure_memory(
        workload.operator,
        *workload.inputs,
        parameters=workload.parameters,
        backward=workload.backward,
        dense_grad=dense_grad,
        memory_limit=limit_bytes,
    )


def disagreements(prediction: Prediction, record: Record) -> dict[str, tuple[object, object]]:
    """Returns field -> (predicted, measured) for known fields that differ."""
    names = [name for name in FIGURES if name not in prediction.bounds]
    pairs = {name: (getattr(prediction.record, name), getattr(record, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def compare_all(operators: list[str], further: Sequence[tuple[int, ...]] = ()) -> tuple[int, int]:
    """Asserts that known figures equal measured ones. Returns the numbers of cases and of exact predictions."""
    compared = exact = 0
    for operator in operators:
        for case, dense_grad in cells(operator, further):
            prediction = predict_memory(case, dense_grad=dense_grad)
            if prediction.record.status == "unsupported":
                continue
            assert disagreements(prediction, measured(case, dense_grad)) == {}, (case, dense_grad)
            compared += 1
            exact += prediction.exact
    return compared, exact


@pytest.mark.extension
@pytest.mark.parametrize("operator", [name for name in EAGER if name not in REFUSED])
def test_predictions_equal_measurements(operator: str) -> None:
    compared, exact = compare_all([operator], SPLIT.get(operator, ()))
    assert compared
    # With AMX, what flash attention packs in 16 bits is not known.
    assert exact >= compared // (4 if torch.cpu._is_amx_tile_supported() else 2)


@pytest.mark.extension
@pytest.mark.parametrize("length", [191, 192, 767, 768])
def test_flash_attention_changes_its_tile_between_two_lengths(length: int) -> None:
    case = case_of("softmax/flash", query_len=length, kv_len=length, mode="inference")
    prediction = predict_memory(case)
    assert prediction.exact
    assert disagreements(prediction, measured(case)) == {}


def test_many_cases_are_compared() -> None:
    assert sum(1 for operator in EAGER if operator not in REFUSED for _ in cells(operator)) > 400


@pytest.mark.extension
@pytest.mark.isolated(OMP_NUM_THREADS="1")
def test_predictions_equal_measurements_with_one_thread() -> None:
    """With one thread, flash attention's backward is known, too."""
    assert torch.get_num_threads() == 1
    compare_all(["softmax", "softplus", "linear-causal", "compressed"])
    assert predict_memory(case_of("softmax")).exact


@pytest.mark.extension
@pytest.mark.isolated
def test_predictions_equal_measurements_with_three_threads() -> None:
    torch.set_num_threads(3)
    compare_all(["naive", "softmax", "softplus", "linear", "linear-causal", "compressed", "combinator"])


@pytest.mark.extension
def test_predictions_for_another_number_of_threads() -> None:
    case = case_of("linear-causal", query_len=1024, kv_len=1024, dim=120)
    one, four = (predict_memory(case, threads=threads).record.forward_peak_bytes for threads in (1, 4))
    assert one is not None
    assert four is not None
    assert one < four


def test_flash_attention_names_what_depends_on_threads() -> None:
    prediction = predict_memory(case_of("softmax"), threads=2)
    assert prediction.unknown == ("how many of 2 threads have their sums of rows at once",)
    assert prediction.bounds == {"backward_peak_bytes", "workspace_bytes"}
    assert prediction.known_terms.keys() & {"forward_peak_bytes", "backward_peak_bytes"} == {"forward_peak_bytes"}
    sums = 9 * 4  # sums of the rows of a tile, per thread
    alone = predict_memory(case_of("softmax"), threads=1)
    assert alone.exact
    assert 2 * sums in prediction.terms["backward_peak_bytes"].values()
    assert sums in alone.terms["backward_peak_bytes"].values()


@pytest.mark.extension
def test_terms_add_up_and_equal_a_timeline() -> None:
    case = case_of("memcheck-pyt/naive", query_len=32, kv_len=32, dim=48)
    prediction = predict_memory(case)
    for field, terms in prediction.terms.items():
        assert sum(terms.values()) == getattr(prediction.record, field), field
        assert all(size > 0 for size in terms.values())
    workload = prepare(case)
    record = measure_memory(workload.operator, *workload.inputs, parameters=workload.parameters, details=True)
    for phase in ("forward", "backward"):
        found = [row["bytes"] for row in record.alive_at_peak if row["phase"] == phase and row["name"] != "other"]
        assert found == sorted(prediction.terms[f"{phase}_peak_bytes"].values(), reverse=True)[: len(found)]
    assert {"q", "k", "v", "dq", "dk", "dv", "out.weight"} <= {
        *prediction.terms["forward_peak_bytes"],
        *prediction.terms["gradient_bytes"],
    }


@pytest.mark.extension
def test_nothing_is_allocated() -> None:
    """Except Python numbers, of which torch makes tensors of 8 bytes: autograd keeps two of this model."""
    case = case_of("naive", bsz=64, query_len=4096, kv_len=4096, dim=512, heads=8)
    traced.cache_clear()
    with track() as memory:
        prediction = predict_memory(case)
    assert memory.peak_bytes <= 3 * 8
    assert prediction.record.forward_peak_bytes > 2**36
    assert prediction.exact


@pytest.mark.extension
@pytest.mark.parametrize("operator", ["naive", "softplus", "linear-cumsum", "memcheck-pyt/combinator"])
def test_out_of_memory_is_predicted(operator: str) -> None:
    """Status, phase, request and bytes in use, for budgets from the inputs to the peak."""
    case = case_of(operator, query_len=32, kv_len=32, dim=48)
    enough = predict_memory(case).record
    first = enough.input_bytes + enough.parameter_bytes + 1
    last = max(enough.forward_peak_bytes, enough.backward_peak_bytes)
    fields = ("status", "oom_phase", "oom_requested_bytes", "oom_in_use_bytes", "forward_peak_bytes", "saved_bytes")
    for limit_bytes in (*range(first, last, (last - first) // 9), last - 1, last):
        predicted = predict_memory(case, memory_limit=limit_bytes).record
        found = measured(case, limit_bytes=limit_bytes)
        for field in fields:
            assert getattr(predicted, field) == getattr(found, field), (limit_bytes, field)
    assert predicted.status == "ok"


def test_inputs_that_do_not_fit() -> None:
    record = predict_memory(case_of("naive"), memory_limit=1000).record
    assert (record.status, record.oom_phase, record.forward_peak_bytes) == ("oom", None, None)
    assert record.reason == "the inputs alone do not fit: 864 B requested with 864 B in use"


def test_tensors_beyond_64_bits_fit_nowhere() -> None:
    case = case_of("naive", query_len=10**14, kv_len=10**14)
    record = predict_memory(case, "B200").record
    assert (record.status, record.oom_phase) == ("oom", None)
    prediction = predict_memory(case_of("naive", query_len=10**12, kv_len=10**12))
    assert prediction.unknown[-1] == "what comes after a tensor beyond 64 bits, in the forward"
    assert prediction.record.forward_peak_bytes > 2**63
    assert predict_memory(case_of("naive", query_len=10**12, kv_len=10**12), memory_limit=2**60).record.status == "oom"


def test_operators_of_templates_are_not_predicted() -> None:
    prediction = predict_memory(case_of("flex"), "T4")
    assert (prediction.record.status, prediction.exact, prediction.terms) == ("skipped", False, {})
    reason = "what flex_attention allocates under torch.compile is not predicted"
    assert prediction.record.reason == f"not predicted: {reason}"
    assert closed_bytes(case_of("flex")) == {}


@pytest.mark.parametrize("operator", sorted(REFUSED))
def test_backends_that_a_cpu_lacks_are_unsupported(operator: str) -> None:
    record = predict_memory(case_of(operator)).record
    assert record.status == "unsupported"
    assert "No viable backend for scaled_dot_product_attention" in (record.reason or "")
    assert record.certainty is None
    assert predict_memory(case_of(operator, dim=48, dtype="float16"), "A100-40GB").record.status == "ok"


@pytest.mark.extension
@pytest.mark.parametrize("operator", ["compressed", "linear", "linear-causal", "softplus", "combinator", "naive"])
def test_the_failing_request_is_predicted(operator: str) -> None:
    """With limits around the peak, the result depends on the order of allocations."""
    chance, exact = random.Random(operator), 0
    for _ in range(8):
        sizes = {
            "bsz": chance.choice([1, 3]),
            "query_len": chance.choice([33, 130]),
            "dtype": chance.choice(DTYPES[:2]),
        }
        case = case_of(operator, **sizes, kv_len=130, dim=48, heads=2, mode=chance.choice(["train", "inference"]))
        peaks = predict_memory(case).record
        most = max(peaks.forward_peak_bytes, peaks.backward_peak_bytes or 0)
        limit_bytes = chance.randrange(peaks.input_bytes + peaks.parameter_bytes, most)
        prediction, found = predict_memory(case, memory_limit=limit_bytes), measured(case, limit_bytes=limit_bytes)
        names = ("status", "oom_phase", "oom_requested_bytes", "oom_in_use_bytes")
        differences = {
            name: (getattr(prediction.record, name), getattr(found, name))
            for name in names
            if getattr(prediction.record, name) != getattr(found, name)
        }
        assert differences == {}, (case, limit_bytes)
        exact += prediction.exact
    assert exact == 8


def test_a_status_from_bounds_has_a_doubt() -> None:
    case = case_of("softmax")
    bound = predict_memory(case, threads=2, memory_limit=2**20)
    assert bound.record.status == "ok"
    assert bound.record.doubts == (*bound.unknown, "It fits, as far as known: the run may need more")
    assert predict_memory(case, threads=1, memory_limit=2**20).record.doubts == ()
    assert predict_memory(case, threads=2).record.doubts == bound.unknown  # without a limit


# Operators that are not in the catalog.

MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: torch.nn.Linear(24, 16), (4, 10, 24)),
    "SiLU": (torch.nn.SiLU, (4, 10, 24)),
    "Softmax": (lambda: torch.nn.Softmax(-1), (4, 10, 24)),
    "LogSoftmax": (lambda: torch.nn.LogSoftmax(1), (4, 10, 24)),
    "RMSNorm": (lambda: torch.nn.RMSNorm(24), (4, 10, 24)),
    "Dropout": (torch.nn.Dropout, (4, 10, 24)),
    "CircularPad2d": (lambda: torch.nn.CircularPad2d(1), (2, 3, 8, 8)),
    "RNNCell": (lambda: torch.nn.RNNCell(24, 16), (4, 24)),
    "LayerNorm": (lambda: torch.nn.LayerNorm(24), (4, 10, 24)),
    "GroupNorm": (lambda: torch.nn.GroupNorm(2, 8), (2, 8, 12)),
    "BatchNorm1d": (lambda: torch.nn.BatchNorm1d(8), (2, 8, 12)),
    "Conv1d": (lambda: torch.nn.Conv1d(8, 6, 3), (2, 8, 12)),
    "Conv2d": (lambda: torch.nn.Conv2d(8, 6, 3), (2, 8, 12, 12)),
    "Conv3d": (lambda: torch.nn.Conv3d(4, 6, 3), (2, 4, 6, 6, 6)),
    "ConvTranspose2d": (lambda: torch.nn.ConvTranspose2d(8, 6, 3), (2, 8, 12, 12)),
    "MaxPool2d": (lambda: torch.nn.MaxPool2d(2), (2, 8, 12, 12)),
    "LSTM": (lambda: torch.nn.LSTM(24, 16), (10, 4, 24)),
    "GRU": (lambda: torch.nn.GRU(24, 16), (10, 4, 24)),
    "RNN": (lambda: torch.nn.RNN(24, 16), (10, 4, 24)),
    "GELU": (torch.nn.GELU, (4, 10, 24)),
    "Mish": (torch.nn.Mish, (4, 10, 24)),
    "PixelShuffle": (lambda: torch.nn.PixelShuffle(2), (2, 8, 6, 6)),
    "Upsample": (lambda: torch.nn.Upsample(scale_factor=2), (2, 8, 6, 6)),
    "TransformerEncoderLayer": (lambda: torch.nn.TransformerEncoderLayer(24, 4, 48, 0.0), (10, 4, 24)),
}
EXACT = {"Linear", "SiLU", "Softmax", "LogSoftmax", "RMSNorm", "Dropout", "CircularPad2d", "RNNCell", "RNN", "Mish"}
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "three gradients": lambda x: torch.addcmul(x, x, x),
    "numbers": lambda x: sum(x * index for index in range(1, 4)),
    "max": lambda x: x.max(-1).values,
    "mean": lambda x: x.mean(-1),
    "a tensor of one's own": lambda x: x * torch.tensor([2.0], device=x.device),
    "tril": lambda x: (x * 2).tril(),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda x: (x + x).exp(), x, use_reentrant=False),
    "reentrant checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda x: (x + x).exp(), x, use_reentrant=True),
    "attention with dropout": lambda x: scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.1),
    "attention with fewer heads": lambda x: scaled_dot_product_attention(
        x[None], x[None, :1], x[None, :1], enable_gqa=True
    ),
    "self-attention": lambda x: torch.nn.functional.multi_head_attention_forward(
        *[x] * 3, 24, 4, x.new_ones(72, 24), None, None, None, False, 0.0, x.new_ones(24, 24), None
    )[0],
    "gather": lambda x: x.gather(2, torch.zeros(4, 10, 7, dtype=torch.int64, device=x.device)),
    "cumprod": lambda x: x.cumprod(1),
    "binary cross entropy": lambda x: torch.nn.functional.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()),
    "mse_loss": lambda x: torch.nn.functional.mse_loss(x, x.detach()),
    "index": lambda x: x[torch.zeros(3, dtype=torch.int64, device=x.device)],
    "sort": lambda x: x.sort(-1).values,
    "variance": lambda x: x.var(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
}
EXACT_FUNCTIONS = {"three gradients", "numbers", "max", "mean", "a tensor of one's own", "attention with dropout"}
EXACT_FUNCTIONS |= {"checkpoint", "reentrant checkpoint", "self-attention", "logsumexp"}
EXACT_WITH_ONE_THREAD = {"attention with fewer heads"}  # flash attention's backward


def registered(name: str, build: Callable[[Case], Callable[..., object]], shape: tuple[int, ...]) -> Case:
    """Registers a contender on one tensor and returns its case."""

    def inputs(case: Case) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(shape, device=case.device).requires_grad_(case.mode == "train"),)

    contender = memcheck.bench.catalog.register(name, build, inputs=inputs, has_heads=False)
    CONTENDERS[name] = dataclasses.replace(contender, build=build)
    return Case(name, bsz=1, query_len=1, kv_len=1, dim=1)


def check_unlisted(name: str, build: Callable[[Case], Callable[..., object]], shape: tuple[int, ...]) -> bool:
    """Asserts that known figures equal measured ones in training and inference. Returns whether all are exact."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling allocates a number of 8 bytes
    case = registered(f"tried-{name.replace(' ', '-').replace(chr(39), '')}", build, shape)
    try:
        exact = []
        for mode in ("train", "inference"):
            prediction = predict_memory(dataclasses.replace(case, mode=mode))
            differences = disagreements(prediction, measured(dataclasses.replace(case, mode=mode)))
            assert differences == {}, prediction.unknown
            assert prediction.exact == (not prediction.unknown)
            exact.append(prediction.exact)
        return all(exact)
    finally:
        del CONTENDERS[case.operator]


@pytest.mark.extension
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_predicted_exactly_or_what_it_runs_is_named(name: str) -> None:
    make, shape = MODULES[name]
    assert check_unlisted(name, lambda case: make().to(case.device), shape) == (name in EXACT)


@pytest.mark.extension
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_predicted_exactly_or_what_it_runs_is_named(name: str) -> None:
    exact = name in EXACT_FUNCTIONS or (name in EXACT_WITH_ONE_THREAD and torch.get_num_threads() == 1)
    assert check_unlisted(name, lambda case: FUNCTIONS[name], (4, 10, 24)) == exact


OLD_GPU = "memcheck's CUDA kernels need a GPU of compute capability 8.0 or later, got 7.5"


@pytest.mark.extension
@pytest.mark.parametrize("mode", ["inference", "train", "decode"])
@pytest.mark.parametrize("operator", ["softplus", "linear", "linear-causal", "compressed"])
def test_memcheck_kernels_are_unsupported_on_an_old_gpu(operator: str, mode: str) -> None:
    case = case_of(operator, mode=mode, **({"query_len": 1} if mode == "decode" else {}))
    record = predict_memory(case, "T4").record
    assert (record.status, record.reason) == ("unsupported", OLD_GPU)
    assert record.forward_peak_bytes is None
    assert predict_memory(case, "A10").record.status == "ok"


@pytest.mark.extension
def test_the_combinator_is_unsupported_on_an_old_gpu() -> None:
    assert predict_memory(case_of("combinator"), "T4").record.reason == OLD_GPU


def test_torch_operators_are_predicted_on_an_old_gpu() -> None:
    assert predict_memory(case_of("naive"), "T4").record.status == "ok"


# GPUs.

GPU = Device("box", "cuda", (8, 0), 2**34, 2**34, "made up")
half = functools.partial(case_of, dim=64, heads=1, dtype="float16", query_len=64, kv_len=64)


@pytest.mark.extension
@pytest.mark.parametrize(
    ("architecture", "torch_version", "size"),
    [
        ((7, 5), (2, 13), 8_519_680),
        ((8, 0), (2, 7), 8_519_680),
        ((9, 0), (2, 7), 33_554_432),
        ((10, 0), (2, 11), 8_519_680),
        ((10, 0), (2, 12), 33_554_432),
        ((11, 0), (2, 13), 8_519_680),
        ((11, 0), (2, 14), 33_554_432),
        ((12, 0), (2, 15), 33_554_432),
    ],
)
def test_cublas_workspaces(architecture: tuple[int, int], torch_version: tuple[int, int], size: int) -> None:
    device = dataclasses.replace(GPU, architecture=architecture)
    record = predict_memory(case_of("naive"), device, torch_version=torch_version).record
    assert record.library_workspace_bytes == size
    assert predict_memory(case_of("softplus"), GPU).record.library_workspace_bytes == 0


def test_a_workspace_is_in_each_phase_and_in_no_other_column() -> None:
    kept = predict_memory(case_of("naive"), GPU, torch_version=(2, 14), drop_workspaces=False)
    dropped = predict_memory(case_of("naive"), GPU, torch_version=(2, 14))
    assert {name for name in kept.terms["backward_peak_bytes"] if "cuBLAS" in name} == {
        "cuBLAS workspace",
        "cuBLAS workspace 2",
    }
    assert {name for name in dropped.terms["backward_peak_bytes"] if "cuBLAS" in name} == {"cuBLAS workspace"}
    assert kept.record.saved_bytes == dropped.record.saved_bytes


def test_a_workspace_exists_during_its_call_only() -> None:
    """From torch 2.15 on, no two workspaces exist at once, and none while another operator runs."""
    kept, of_calls = (
        predict_memory(case_of("naive"), GPU, torch_version=version, drop_workspaces=False)
        for version in ((2, 14), (2, 15))
    )
    for phase, workspaces in (("forward", 1), ("backward", 2)):
        before, now = (it.terms[f"{phase}_peak_bytes"] for it in (kept, of_calls))
        assert sum("cuBLAS workspace" in name for name in before) == workspaces
        assert sum("cuBLAS workspace" in name for name in now) == 1
    assert of_calls.record.saved_bytes == kept.record.saved_bytes


# Attention of three dimensions, as memcheck-pyt/softmax has it, is torch's math backend up to 2.13, and fused after.


@pytest.mark.parametrize("torch_version", [(2, 11), (2, 13), (2, 14), (2, 15)])
def test_attention_of_three_dimensions(torch_version: tuple[int, int]) -> None:
    case = case_of("memcheck-pyt/softmax", query_len=64, kv_len=64)
    fused = torch_version >= (2, 14)
    on_cpu = predict_memory(case, torch_version=torch_version)
    assert on_cpu.record.backend == ("flash (cpu)" if fused else "math")
    assert predict_memory(case, GPU, torch_version=torch_version).record.backend == ("efficient" if fused else "math")
    scores = 2 * 64 * 64 * 4
    assert (scores in on_cpu.terms["saved_bytes"].values()) != fused
    assert on_cpu.record.torch_version is not None
    assert on_cpu.record.torch_version.startswith(".".join(map(str, torch_version)))


@pytest.mark.extension
@pytest.mark.parametrize("mask_shape", [(9,), (9, 9), (2, 9, 9)])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_attention_of_three_dimensions_with_a_mask(mask_shape: tuple[int, ...], mask_dtype: torch.dtype) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def inputs(device: str) -> list[torch.Tensor]:
        tensors = [torch.ones(2, 9, 12, device=device, requires_grad=True) for _ in range(3)]
        return [*tensors, torch.ones(mask_shape, device=device).to(mask_dtype)]

    workload = Workload(case_of("naive"), attention, tuple(inputs("meta")), ((), ()), ("q", "k", "v", "mask"))
    trace = TraceRunner(Target("cpu", torch.get_num_threads(), torch_version=running())).trace(workload)
    found = measure_memory(attention, *inputs("cpu"))
    assert sum(allocation.bytes for allocation in trace.saved) == found.saved_bytes
    first, last = trace.phases["forward"]
    peak = max(sum(allocation.bytes for allocation in trace.log.alive(event)) for event in range(first, last + 1))
    assert peak == found.forward_peak_bytes


def test_an_untried_torch_makes_every_figure_a_bound() -> None:
    newer = (NEWEST_TRIED[0], NEWEST_TRIED[1] + 1)
    prediction = predict_memory(case_of("naive"), torch_version=newer)
    assert not prediction.exact
    assert not prediction.record.exact
    (words,) = prediction.record.doubts
    assert words == "what torch 2.16 changed: the newest that predictions were compared with is 2.15"
    assert prediction.known_terms.keys() == {"input_bytes", "parameter_bytes"}


@pytest.mark.isolated
def test_an_untried_running_torch_makes_every_figure_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    for version in (None, (2, 13)):
        assert not predict_memory(case_of("naive"), torch_version=version).exact


def test_a_gpu_of_known_size_only() -> None:
    prediction = predict_memory(case_of("naive"), "40GiB")
    assert prediction.unknown == ("cuBLAS's workspace, as the GPU's architecture is not known",)
    assert "forward_peak_bytes" in prediction.bounds
    assert "saved_bytes" in prediction.known_terms


@pytest.mark.parametrize(
    ("fields", "architecture", "backend"),
    [
        ({}, (8, 0), "flash"),
        ({}, (7, 5), "efficient"),
        ({}, (9, 0), "cudnn"),
        ({"dtype": "float32"}, (9, 0), "efficient"),
        ({"dtype": "float64"}, (9, 0), "math"),
        ({"dim": 512}, (8, 0), "efficient"),
        ({"dtype": "bfloat16"}, (7, 5), "math"),
        ({"dim": 36, "dtype": "float32"}, (8, 0), "efficient"),
        ({"dim": 35, "dtype": "float32"}, (8, 0), "math"),
        ({"query_len": 9}, (8, 0), "flash"),
        ({"query_len": 9, "dtype": "float32"}, (8, 0), "efficient"),
    ],
)
def test_the_attention_backend_of_a_gpu(fields: dict, architecture: tuple[int, int], backend: str) -> None:
    device = dataclasses.replace(GPU, architecture=architecture)
    prediction = predict_memory(half("softmax", **fields), device, torch_version=(2, 13))
    assert prediction.record.backend == backend
    assert prediction.record.status == "ok"
    if backend == "cudnn":
        assert prediction.unknown == ("the workspace of cuDNN's plan",)


def test_flash_attention_on_a_gpu_keeps_no_scores() -> None:
    prediction = predict_memory(half("softmax", bsz=8, query_len=4096, kv_len=4096, heads=2, dim=128), GPU)
    U = 8 * 4096 * 128 * 2
    assert (prediction.certainty, prediction.unknown) == ("verified", ())
    assert prediction.record.saved_bytes == 8 * 2 * 4096 * 4 + 16 + 8
    terms = prediction.terms["backward_peak_bytes"]
    assert (terms["dq in float32"], terms["y, laid out"]) == (2 * U, U)


def test_allocated_counts_blocks_and_reserved_segments() -> None:
    record = predict_memory(case_of("naive"), GPU).record
    for phase in ("forward", "backward"):
        assert getattr(record, f"{phase}_max_allocated_bytes") % 512 == 0
        assert getattr(record, f"{phase}_max_allocated_bytes") >= getattr(record, f"{phase}_peak_bytes")
    assert record.backward_max_allocated_bytes >= record.forward_max_allocated_bytes
    assert record.reserved_bytes % (2 * MIB) == 0
    assert record.reserved_bytes >= record.backward_max_allocated_bytes


def test_a_limit_on_a_gpu_is_of_segments() -> None:
    case = case_of("naive", bsz=4, query_len=512, kv_len=512, dim=64, heads=2)
    # In this torch, cuBLAS workspaces stay, so that the backward takes more segments than the forward.
    predicted = functools.partial(predict_memory, case, GPU, torch_version=(2, 14))
    needed = predicted().record
    limits = range(needed.input_bytes + 2**20, 2 * needed.reserved_bytes, 2**20)
    found = [predicted(memory_limit=limit_bytes).record for limit_bytes in limits]
    verdicts = [record.oom_phase or record.status for record in found]
    assert list(dict.fromkeys(verdicts)) == ["forward", "backward", "ok"]
    short = found[verdicts.index("backward")]
    assert short.oom_requested_bytes % (2 * MIB) == 0
    assert short.forward_max_allocated_bytes == needed.forward_max_allocated_bytes
    assert short.backward_max_allocated_bytes is None


def test_a_limit_beyond_the_gpu_changes_nothing() -> None:
    case = case_of("naive", bsz=4, query_len=512, kv_len=512, dim=64, heads=2)
    needed = predict_memory(case, GPU).record.reserved_bytes
    small = dataclasses.replace(GPU, total_bytes=needed // 2, usable_bytes=needed // 2)
    alone = predict_memory(case, small).record
    assert alone.status == "oom"
    assert predict_memory(case, small, memory_limit=2 * needed).record == alone


def test_expandable_segments_reserve_pages() -> None:
    case = case_of("naive", bsz=4, query_len=512, kv_len=512, dim=64, heads=2)
    pages = predict_memory(case, GPU, expandable_segments=True)
    assert set(pages.terms["reserved_bytes"]) == {"pages of 20 MiB", "pages of 2 MiB, small pool"}
    assert pages.record.forward_peak_bytes == predict_memory(case, GPU).record.forward_peak_bytes


@pytest.mark.extension
def test_a_prediction_has_the_fields_of_a_measurement() -> None:
    case = case_of("naive", mode="decode")
    predicted, found = dataclasses.asdict(predict_memory(case).record), dataclasses.asdict(measured(case))
    unlike = {name for name, value in found.items() if value is not None and predicted[name] is None}
    assert unlike <= {"device_name", "device_free_bytes"}
    assert predicted["state_bytes"] == 2 * 2 * 9 * 12 * 4
    assert predicted["state_bytes_per_token"] == predicted["state_bytes"] / 18


@pytest.mark.parametrize("name", ["nothing", "A1000000"])
def test_unknown_devices_are_named(name: str) -> None:
    with pytest.raises(UsageError, match="unknown; known: cpu"):
        predict_memory(case_of("naive"), name)


@pytest.mark.extension
@pytest.mark.extension
def test_every_contender_but_flex_is_predicted_on_a_gpu() -> None:
    for operator in (*attention_types(), *combinator_types()):
        record = predict_memory(case_of(operator, dim=48, dtype="float16"), GPU).record
        assert record.status == ("skipped" if operator == "flex" else "ok"), (operator, record.reason)
