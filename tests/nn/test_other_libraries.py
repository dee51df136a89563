"""The projections are torch.nn.Linear: tensor parallelism, quantization and LoRA see them, and old weights load."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import run_all
from torch import Tensor

from memcheck.nn import CompressedSelfAttention, Decoder, LinearSelfAttention, SoftplusSelfAttention

NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")
MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "softplus": partial(SoftplusSelfAttention, 8, 12),
    "linear": partial(LinearSelfAttention, 8, 4, 2),
    "compressed": partial(CompressedSelfAttention, 8, 4, 2, factor=2),
}
modules = pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)


def tokens() -> Tensor:
    return torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(2))


@modules
def test_the_projections_are_linear_layers(build: Callable[..., torch.nn.Module]) -> None:
    assert {type(getattr(build(), name)) for name in NAMES} == {torch.nn.Linear}


# ---- weights of 0.1.0


def old(module: torch.nn.Module) -> OrderedDict[str, Tensor]:
    """The state dict of memcheck 0.1.0, whose weights were (E,R), as torch.save keeps it."""
    state = module.state_dict()
    for name, weight in state.items():
        if name.rpartition(".")[0].endswith(NAMES):
            state[name] = weight.mT.contiguous()
    for versions in state._metadata.values():  # type: ignore[attr-defined]
        versions["version"] = 1
    return state


@pytest.mark.parametrize("core_dim", [8, 12])
def test_weights_of_an_older_version_load(core_dim: int, tmp_path: Path) -> None:
    module, other = (SoftplusSelfAttention(8, core_dim) for _ in range(2))
    torch.save(old(module), tmp_path / "old.pt")
    other.load_state_dict(torch.load(tmp_path / "old.pt"))
    assert torch.equal(other(tokens()), module(tokens()))


def test_a_decoder_of_an_older_version_loads() -> None:
    ids = torch.arange(7)[None]
    for attention in ("softplus", "linear"):
        model, other = (Decoder(11, 8, 12, 2, 2, context=7, attention=attention) for _ in range(2))
        state = old(model) if attention == "softplus" else model.state_dict()
        other.load_state_dict(state)
        assert torch.equal(other(ids), model(ids))


def test_without_a_version_the_shape_tells() -> None:
    """Files of safetensors have none."""
    module, other = (SoftplusSelfAttention(8, 12) for _ in range(2))
    for state in (dict(old(module)), dict(module.state_dict())):
        other.load_state_dict(state)
        assert torch.equal(other(tokens()), module(tokens()))
    square, other = (SoftplusSelfAttention(8) for _ in range(2))
    other.load_state_dict(dict(square.state_dict()))
    assert torch.equal(other(tokens()), square(tokens()))
    with pytest.raises(RuntimeError, match=r"size mismatch for q_proj\.weight"):
        other.load_state_dict(dict(module.state_dict()))


# ---- other libraries


@pytest.mark.filterwarnings("ignore")  # torch calls its quantization deprecated.
@modules
def test_dynamic_quantization_takes_every_projection(build: Callable[..., torch.nn.Module]) -> None:
    module, x = build(), tokens()
    quantized = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, dtype=torch.qint8)
    assert [name for name in NAMES if not isinstance(getattr(quantized, name), torch.ao.nn.quantized.Linear)] == []
    assert quantized(x).isfinite().all()


RANK = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from memcheck.nn import CompressedSelfAttention, LinearSelfAttention, SoftplusSelfAttention

dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel()}
for build in (
    lambda: SoftplusSelfAttention(8, 12, dtype=torch.float64),
    lambda: LinearSelfAttention(8, 4, 2, dtype=torch.float64),
    lambda: CompressedSelfAttention(8, 4, 2, factor=2, dtype=torch.float64),
):
    torch.manual_seed(1)
    module, x = build(), torch.randn(2, 9, 8, dtype=torch.float64)
    expected = module(x)
    parallelize_module(module, mesh, plan)
    assert module.k_proj.weight.to_local().shape[0] * 2 == module.k_proj.weight.shape[0]
    torch.testing.assert_close(module(x), expected)
dist.destroy_process_group()
"""


def test_tensor_parallelism_splits_heads_and_channels(tmp_path: Path) -> None:
    """Two processes of gloo, each with half of the heads or of the channels, give the whole result."""
    ended = run_all([("-c", RANK, rank, tmp_path / "group") for rank in range(2)])
    assert [process.returncode for process in ended] == [0, 0], ended


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@modules
def test_lora_adapts_every_projection(
    require_package: Callable[[str], None], build: Callable[..., torch.nn.Module]
) -> None:
    """Merged, the adapted model gives the same; nothing but the adapters has a gradient."""
    for package in ("transformers", "peft"):
        require_package(package)
    from zoo_of_models import loaded

    loaded().with_stubs_of_torchvision()
    import peft

    torch.manual_seed(1)
    model, x = torch.nn.Sequential(build(dtype=torch.float64)), tokens().double()
    before = model(x)
    config = peft.LoraConfig(r=2, target_modules=list(NAMES), init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    y = adapted(x)
    assert not torch.allclose(y, before)
    y.sum().backward()
    with_gradient = [name for name, weight in adapted.named_parameters() if weight.grad is not None]
    assert len(with_gradient) == 2 * len(NAMES)
    assert all(re.search(r"lora_[AB]", name) for name in with_gradient)
    torch.testing.assert_close(adapted.merge_and_unload()(x), y)
