"""What is predicted for this GPU is what it says: requested bytes to the byte, blocks and segments by the model."""

from __future__ import annotations

import dataclasses
import gc
import random

import pytest
import torch

from memcheck.allocator import CachingAllocator
from memcheck.bench.case import CONTENDERS, Case
from memcheck.bench.catalog import combinator_types, make_case, make_combinator_case
from memcheck.bench.predict import predict_case
from memcheck.core.devices import this_gpu
from memcheck.core.record import Record
from memcheck.core.step import Place
from memcheck.measure.measurement import measure_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EAGER = [name for name, contender in CONTENDERS.items() if not contender.compiled]
REQUESTED = (
    "input_bytes",
    "output_bytes",
    "parameter_bytes",
    "forward_peak_bytes",
    "saved_bytes",
    "backward_peak_bytes",
    "gradient_bytes",
    "library_workspace_bytes",
)
# bsz, query_len, kv_len, dim, heads
SHAPES = [(2, 256, 256, 128, 2), (4, 512, 512, 256, 4), (2, 128, 1024, 128, 2), (1, 33, 65, 48, 3)]


def case_of(operator: str, shape: tuple[int, int, int, int, int], dtype: str, mode: str) -> Case:
    bsz, query_len, kv_len, dim, heads = shape
    fields = {"bsz": bsz, "query_len": query_len, "dim": dim, "dtype": dtype, "mode": mode, "device": "cuda:0"}
    if operator in combinator_types():
        return make_combinator_case(operator, **fields)
    return make_case(operator, kv_len=kv_len, heads=heads, core_dim=None, factor=None, **fields)


def measured(case: Case) -> Record:
    """From an allocator that has cached nothing, as predictions are."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        pytest.skip("something else of this process is on the GPU")
    return measure_memory(case.step(), Place("cuda:0"))


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operator", EAGER)
def test_requested_allocated_and_reserved(operator: str, shape: tuple, dtype: str, mode: str) -> None:
    case = case_of(operator, shape, dtype, mode)
    device = dataclasses.replace(this_gpu(), usable_bytes=None)
    prediction = predict_case(case, device)
    if prediction.record.status != "ok":
        pytest.skip(prediction.record.reason or prediction.record.status)
    record = measured(case)
    names = (*REQUESTED, "forward_max_allocated_bytes", "backward_max_allocated_bytes", "reserved_bytes")
    known = [name for name in names if name not in prediction.bounds]
    differences = {
        name: (getattr(prediction.record, name), getattr(record, name))
        for name in known
        if getattr(prediction.record, name) != getattr(record, name)
    }
    assert differences == {}, f"predicted, measured; not known: {prediction.unknown}"


def test_the_model_allocates_as_the_allocator_does() -> None:
    """The same thousand requests and frees, in the allocator and in its model: the same counters after each."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        pytest.skip("something else of this process is on the GPU")
    chance, model, alive = random.Random(0), CachingAllocator(), []
    for step in range(1000):
        if chance.random() < 0.55 or not alive:
            size = int(2 ** chance.uniform(0, 26))
            alive.append((torch.empty(size, dtype=torch.uint8, device="cuda"), model.malloc(size)))
        else:
            tensor, block = alive.pop(chance.randrange(len(alive)))
            del tensor
            model.free(block)
        found = torch.cuda.memory_stats()
        for name, count in (
            ("requested", model.requested),
            ("allocated", model.allocated),
            ("reserved", model.reserved),
        ):
            assert found[f"{name}_bytes.all.current"] == count.current, (step, name)
