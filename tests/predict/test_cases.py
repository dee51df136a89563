"""Predictions equal measurements to the byte on the CPU. tests/published compares published figures of GPUs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from predict.compared import figures
from torch.nn import functional

from memcheck import predict_memory
from memcheck.allocator import MIB
from memcheck.bench.case import CONTENDERS, Case
from memcheck.bench.catalog import attention_types, combinator_types, make_case, make_combinator_case
from memcheck.bench.profile import known_terms
from memcheck.core.devices import NEWEST_TRIED, Device, running
from memcheck.core.errors import UsageError
from memcheck.core.prediction import Prediction
from memcheck.core.record import Record
from memcheck.core.step import Place
from memcheck.measure.measurement import measure_memory

pytestmark = pytest.mark.cpu

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
    return measure_memory(dataclasses.replace(case.step(), dense_grad=dense_grad), Place(memory_limit=limit_bytes))


def disagreements(prediction: Prediction, record: Record) -> dict[str, tuple[object, object]]:
    """Returns field -> (predicted, measured) for known fields that differ."""
    predicted, real = figures(prediction.record), figures(record)
    names = real.keys() - prediction.bounds - {"state_bytes"}  # A measured step knows no state.
    return {name: (predicted[name], real[name]) for name in names if predicted[name] != real[name]}


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
    """A kernel that runs once shows it, and so does our rule."""
    q = torch.randn(1, 4, length, 64)
    found = measure_memory(functional.scaled_dot_product_attention, q, q, q, backward=False)
    for probes in (True, False):
        prediction = predict_memory(functional.scaled_dot_product_attention, q, q, q, backward=False, probes=probes)
        assert prediction.exact
        assert disagreements(prediction, found) == {}


def test_many_cases_are_compared() -> None:
    assert sum(1 for operator in EAGER if operator not in REFUSED for _ in cells(operator)) > 400


@pytest.mark.extension
@pytest.mark.isolated(OMP_NUM_THREADS="1")
@pytest.mark.parametrize(
    "operators",
    [["softmax", "linear-causal"], pytest.param(["softplus", "compressed"], marks=pytest.mark.nightly)],
    ids=" ".join,
)
def test_predictions_equal_measurements_with_one_thread(operators: list[str]) -> None:
    """With one thread, flash attention's backward is known, too."""
    assert torch.get_num_threads() == 1
    compare_all(operators)
    assert predict_memory(case_of("softmax")).exact


@pytest.mark.extension
@pytest.mark.isolated
@pytest.mark.parametrize(
    "operators",
    [
        ["naive", "softplus", "linear-causal", "compressed", "combinator"],
        pytest.param(["softmax", "linear"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_predictions_equal_measurements_with_three_threads(operators: list[str]) -> None:
    torch.set_num_threads(3)
    compare_all(operators)


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
    record = measure_memory(case.step(), details=True)
    for phase in ("forward", "backward"):
        found = [row["bytes"] for row in record.alive_at_peak if row["phase"] == phase and row["name"] != "other"]
        assert found == sorted(prediction.terms[f"{phase}_peak_bytes"].values(), reverse=True)[: len(found)]
    assert {"q", "k", "v", "dq", "dk", "dv", "out.weight"} <= {
        *prediction.terms["forward_peak_bytes"],
        *prediction.terms["gradient_bytes"],
    }


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
    record = predict_memory(case_of("naive", query_len=10**12, kv_len=10**12)).record
    assert (record.status, record.reason) == ("oom", "predicted: a tensor of 2^63 bytes or more does not fit")
    assert predict_memory(case_of("naive", query_len=10**12, kv_len=10**12), memory_limit=2**60).record.status == "oom"


def test_flex_attention_is_compiled_for_the_gpu() -> None:
    prediction = predict_memory(case_of("flex", query_len=128, kv_len=128, dim=48), "A100-40GB")
    assert (prediction.record.status, prediction.record.backend) == ("ok", "inductor")
    narrow = predict_memory(case_of("flex"), "A100-40GB").record
    assert narrow.status == "unsupported"
    assert "embedding dimension of the query, key, and value must be at least 16" in (narrow.reason or "")
    assert known_terms(case_of("flex")) is None


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


def test_a_workspace_is_in_each_phase_and_in_no_other_column() -> None:
    kept = predict_memory(case_of("naive"), GPU, torch_version=(2, 14), drop_workspaces=False)
    dropped = predict_memory(case_of("naive"), GPU, torch_version=(2, 14))
    assert {name for name in kept.terms["backward_peak_bytes"] if "cuBLAS" in name} == {
        "cuBLAS workspace",
        "cuBLAS workspace 2",
    }
    assert {name for name in dropped.terms["backward_peak_bytes"] if "cuBLAS" in name} == {"cuBLAS workspace"}
    assert kept.record.saved_bytes == dropped.record.saved_bytes


# Attention of three dimensions, as memcheck-pyt/softmax has it, is torch's math backend up to 2.13, and fused after.


def test_attention_of_three_dimensions() -> None:
    case = case_of("memcheck-pyt/softmax", query_len=64, kv_len=64)
    fused = running() >= (2, 14)
    on_cpu = predict_memory(case)
    assert on_cpu.record.backend == ("flash (cpu)" if fused else "math")
    assert predict_memory(case, GPU).record.backend == ("efficient" if fused else "math")
    assert (2 * 64 * 64 * 4 in on_cpu.terms["saved_bytes"].values()) != fused


def test_an_untried_torch_makes_every_figure_a_bound() -> None:
    newer = (NEWEST_TRIED[0], NEWEST_TRIED[1] + 1)
    prediction = predict_memory(case_of("naive"), GPU, torch_version=newer)
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
def test_every_contender_is_predicted_on_a_gpu() -> None:
    for operator in (*attention_types(), *combinator_types()):
        record = predict_memory(case_of(operator, dim=48, dtype="float16"), GPU).record
        assert record.status == "ok", (operator, record.reason)
