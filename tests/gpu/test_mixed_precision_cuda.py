"""`memcheck mixed-precision` on a GPU: sums as on the CPU, and the dtypes that CUDA's lists of autocast say."""

import pytest
import torch

from memcheck.studies.accumulation import COMBINATIONS, running_sums, underflows
from memcheck.studies.autocast_stages import run_stages

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("accumulator", "addend", "converted"), COMBINATIONS)
def test_sums_are_those_of_the_cpu(accumulator: torch.dtype, addend: torch.dtype, converted: bool) -> None:
    here, there = (
        running_sums(0.01, 1000, accumulator, addend, converted=converted, device=device) for device in ("cpu", "cuda")
    )
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_and_loss_are_float32(dtype: torch.dtype) -> None:
    run = run_stages(dtype, autocast=True, device="cuda")
    outputs = {stage.name: stage.output_dtype for stage in run.stages}
    low = run.autocast_dtype
    assert outputs == {**dict.fromkeys(outputs, low), "ln": "float32", "loss": "float32"}
    assert all(stage.parameter_gradient_dtype in (None, "float32") for stage in run.stages)


def test_underflow() -> None:
    assert [it.output_gradient == 0 for it in underflows("cuda")] == [False, False, True, False]
