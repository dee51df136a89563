"""Steps that tell a simulated GPU from what was predicted, in groups.

They are of the zoo, the tests on an H200 and published tables, and ways to attend, to step and to transform.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests")]

from zoo_of_models import loaded  # noqa: E402

from memcheck.bench.case import CONTENDERS, Case  # noqa: E402
from memcheck.bench.catalog import combinator_types, make_case, make_combinator_case  # noqa: E402

Sizes = tuple[int, ...]
Made = tuple[Any, tuple[Any, ...], dict[str, Any]]  # A model, its inputs, and those that have names.


@dataclass(frozen=True)
class Program:
    """A step. make: called where new tensors are on the CPU, or without data if the step is large.

    how: options of a step. of_catalog: is predicted as such.
    """

    make: Callable[[], Made]
    how: dict[str, Any] = field(default_factory=dict)
    large: bool = False
    of_catalog: Case | None = None

    def on_cuda(self) -> Made:
        model, inputs, kwargs = self.without_gpu()
        if isinstance(model, nn.Module):
            model = with_memory(model) if self.large else model.cuda()
        return model, *moved((inputs, kwargs))

    def without_gpu(self) -> Made:
        with torch.device("meta" if self.large else "cpu"):
            return self.make()


def with_memory(model: nn.Module) -> nn.Module:
    """A model of the meta device on the GPU, in the order in which .cuda() moves. What is one parameter stays one."""
    there: dict[Tensor, Tensor] = {}
    model._apply(lambda x: there.setdefault(x, torch.empty_like(x, device="cuda")) if x.is_meta else x)
    one: dict[int, Tensor | None] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = one.setdefault(parameter.data_ptr(), parameter)
    return model


def moved(parts: Any) -> Any:
    """On the GPU. What is one tensor stays one."""
    there: dict[int, Tensor] = {}

    def on_cuda(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) not in there:
            made = torch.zeros_like(x, device="cuda") if x.is_meta else x.detach().cuda()
            there[id(x)] = made.detach().requires_grad_(x.requires_grad)
        return there.get(id(x), x)

    return tree_map(on_cuda, parts)


Group = Iterator[tuple[str, Program]]


def zoo(packaged: bool) -> Group:
    """packaged: the models of other packages, or all else."""
    module = loaded()
    for name in module.available(module.ZOO):
        entry = module.ZOO[name]
        if (entry.needs is not None) is packaged:
            yield name, Program(functools.partial(of_zoo, entry), entry.how())


def of_zoo(entry: Any) -> Made:
    model, inputs, *rest = entry.build()
    return model, inputs, rest[0] if rest else {}


# bsz, query_len, kv_len, dim, heads
SHAPES = [(2, 256, 256, 128, 2), (4, 512, 512, 256, 4), (2, 128, 1024, 128, 2), (1, 33, 65, 48, 3)]


def catalog() -> Group:
    """The cases of tests/gpu/test_prediction_cuda.py."""
    names = [name for name, contender in CONTENDERS.items() if not contender.compiled]
    for name, shape, dtype in itertools.product(names, SHAPES, ("float32", "float16", "bfloat16")):
        for mode in ("train", "inference"):
            bsz, query_len, kv_len, dim, heads = shape
            more: dict[str, Any] = {"bsz": bsz, "query_len": query_len, "dim": dim, "dtype": dtype, "mode": mode}
            more["device"] = "cuda:0"
            if name in combinator_types():
                case = make_combinator_case(name, **more)
            else:
                case = make_case(name, kv_len=kv_len, heads=heads, core_dim=None, factor=None, **more)
            how = {"backward": mode == "train"}
            yield f"{name} {shape} {dtype} {mode}", Program(functools.partial(of_catalog, case), how, True, case)


def of_catalog(case: Case) -> Made:
    contender = CONTENDERS[case.operator]
    return contender.build(case), (*contender.inputs(case), *contender.parameters(case)), {}


class Function(nn.Module):
    """f(parameters, *inputs), with parameters of these shapes.

    pause: seconds after it, in which autograd's thread lets go of what a backward within f has worked with.
    """

    def __init__(self, f: Callable[..., Any], *shapes: Sizes, pause: float = 0) -> None:
        super().__init__()
        self.f, self.pause = f, pause
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, *inputs: Any) -> Any:
        y = self.f(self.weights, *inputs)
        time.sleep(self.pause)
        return y


class WithTargets(nn.Module):
    """A model that also returns what its loss compares with, so that it is an input."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Any, Tensor]:
        return self.model(x, **self.options), targets


def numbers(*shape: int, dtype: torch.dtype = torch.float32, wants: bool = True) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(wants)


def function(f: Callable[..., Any], inputs: Callable[[], Any], *weights: Sizes, **how: Any) -> Program:
    return Program(lambda: (Function(f, *weights, pause=0.02), inputs(), {}), how)


# ---- attention

MASKS: dict[str, Callable[[int, torch.dtype], tuple[Tensor, ...]]] = {
    "causal": lambda length, dtype: (),
    "plain": lambda length, dtype: (),
    "dropout": lambda length, dtype: (),
    "fewer heads": lambda length, dtype: (),
    "mask": lambda length, dtype: (numbers(length, length, dtype=dtype, wants=False),),
    "bools": lambda length, dtype: (torch.rand(length, length) > 0.5,),
}


def attention() -> Group:
    """Each call for which scaled_dot_product_attention chooses among its backends."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, dim, length, how in itertools.product(dtypes, (32, 64, 80, 128, 192, 256), (127, 1024), MASKS):
        if length == 127 or how not in ("plain", "dropout"):
            name = f"{str(dtype).removeprefix('torch.')} {dim} of {length}, {how}"
            yield name, Program(functools.partial(of_attention, dtype, dim, length, how))


def of_attention(dtype: torch.dtype, dim: int, length: int, how: str) -> Made:
    heads = 2 if how == "fewer heads" else 4
    q, k, v = (numbers(2, count, length, dim, dtype=dtype) for count in (4, heads, heads))
    options = {"is_causal": how == "causal", "dropout_p": 0.1 * (how == "dropout"), "enable_gqa": heads == 2}
    model = Function(lambda _, *inputs: functional.scaled_dot_product_attention(*inputs, **options))
    return model, (q, k, v, *MASKS[how](length, dtype)), {}


# ---- ways to step and to transform

KINDS: dict[str, dict[str, bool]] = {
    "": {},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "differentiable": {"differentiable": True},
    "maximize": {"maximize": True},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD, momentum": {"momentum": 0.9},
    "RMSprop, centered": {"momentum": 0.9, "centered": True},
    "Adam, amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW, rate in a tensor": {"lr": torch.tensor(1e-3), "foreach": True, "capturable": True},
}
UNSTEPPED = ("LBFGS", "Optimizer", "SparseAdam")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(63, 127), nn.GELU(), nn.LayerNorm(127), nn.Linear(127, 64))


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def optimizers() -> Group:
    """torch's optimizers in each of their implementations."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name not in UNSTEPPED}
    for (name, kind), (way, options) in itertools.product(kinds.items(), KINDS.items()):
        if set(options) <= set(inspect.signature(kind).parameters):
            yield f"{name} {way}".strip(), stepped(functools.partial(kind, **options))
    for title, settings in SETTINGS.items():
        kind = kinds[title.partition(",")[0]]
        yield title, stepped(functools.partial(kind, **settings))
    for title, how in {
        "accumulated": {"accumulate": 2},
        "clipped": {"clip_grad_norm": 1.0},
        "gradients kept": {"set_to_none": False},
        "autocast": {"autocast": "bf16"},
        "first step": {"steps": 1},
    }.items():
        yield f"AdamW, {title}", stepped(torch.optim.AdamW, **how)


def stepped(optimizer: Callable[..., Any], **how: Any) -> Program:
    def make(parameters: Any) -> Any:
        given = list(parameters)
        is_muon = getattr(optimizer, "func", optimizer) is getattr(torch.optim, "Muon", None)
        return optimizer([x for x in given if x.dim() == 2] if is_muon else given)

    return Program(lambda: (mlp(), (numbers(17, 63),), {}), {"optimizer": make, "loss": mean_square, **how})


def checkpointed(weights: Any, x: Tensor, reentrant: bool) -> Tensor:
    for weight in weights:
        x = checkpoint(lambda x, weight: (x @ weight).relu(), x, weight, use_reentrant=reentrant)
    return x.sum()


def on_the_host(weights: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x @ weights[0]).tanh().sum()


def under_autocast(weights: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return ((x @ weights[0]).relu() @ weights[1]).float().sum()


def double_backward(weights: Any, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((x @ weights[0]).square().sum(), x, create_graph=True)
    return gradient.square().sum()


def per_sample(weights: Any, x: Tensor) -> Any:
    f = torch.func.grad(lambda weight, x: (x @ weight).tanh().square().mean())
    return torch.func.vmap(f, (None, 0))(weights[0] * 1, x)


def scattered(weights: Any, x: Tensor, places: Tensor) -> Tensor:
    added = torch.zeros_like(x).scatter_add(0, places[:, None].expand_as(x), x)
    return weights[0].index_add(0, places, x).sum() + added.sum()


def transforms() -> Group:
    """torch.func's transformations, and what else a forward may be made of."""
    square, wide = ((64, 64),), lambda: (numbers(33, 64),)
    func = torch.func
    yield "vmap", function(lambda w, x: func.vmap(lambda a: (a @ w[0]).tanh().sum())(x).sum(), wide, *square)
    yield "grad", function(lambda w, x: func.grad(lambda a: (a @ w[0]).tanh().sum())(x).sum(), wide, *square)
    yield "gradients of each sample", function(per_sample, wide, *square)
    yield "jacrev", function(lambda w, x: func.jacrev(lambda a: (a @ w[0]).tanh())(x[0]).sum(), wide, *square)
    yield "jacfwd", function(lambda w, x: func.jacfwd(lambda a: (a @ w[0]).tanh())(x[0]).sum(), wide, *square)
    yield "hessian", function(lambda w, x: func.hessian(lambda a: (a @ w[0]).tanh().sum())(x[0]).sum(), wide, *square)
    tangent = lambda w, x: func.jvp(lambda a: (a @ w[0]).tanh(), (x,), (torch.ones_like(x),))[1].sum()  # noqa: E731
    yield "jvp", function(tangent, wide, *square)
    yield "vjp", function(lambda w, x: func.vjp(lambda a: a @ w[0], x)[1](torch.ones_like(x))[0].sum(), wide, *square)
    yield "double backward", function(double_backward, wide, *square)
    yield "saved on the host", function(on_the_host, wide, *square)
    for reentrant in (False, True):
        f = functools.partial(checkpointed, reentrant=reentrant)
        words = "checkpointed, reentrant" if reentrant else "checkpointed"
        yield words, function(f, wide, *square * 2)
        yield f"{words}, autocast", function(f, wide, *square * 2, autocast="fp16", optimizer="adamw")
    yield "autocast inside", function(under_autocast, wide, *square * 2, optimizer="adamw")
    yield (
        "complex numbers",
        function(
            lambda w, x: (torch.view_as_complex(x) * torch.view_as_complex(w[0])).abs().sum(),
            lambda: (numbers(64, 2),),
            (64, 2),
        ),
    )
    yield (
        "irfft of rfft",
        function(lambda w, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w[0])).sum(), wide, (64,)),
    )
    window = lambda x: torch.ones(64, device=x.device)  # noqa: E731
    yield (
        "stft",
        function(
            lambda _, x: torch.stft(x, 64, return_complex=True, window=window(x)).abs().sum(),
            lambda: (numbers(4, 1023),),
        ),
    )
    yield (
        "index_add and scatter_add",
        function(scattered, lambda: (numbers(32, 16), torch.randint(32, (32,))), (32, 16)),
    )
    yield (
        "sort, topk, cumsum",
        function(lambda _, x: x.sort(-1)[0].sum() + x.topk(4)[0].sum() + x.cumsum(-1).sum(), wide),
    )
    yield (
        "interpolations",
        function(
            lambda _, x: sum(
                functional.interpolate(x, scale_factor=2, mode=mode).sum() for mode in ("bilinear", "nearest")
            ),
            lambda: (numbers(2, 3, 17, 17),),
        ),
    )
    yield "channels last", Program(in_channels_last)
    yield (
        "transposed and grouped convolutions",
        Program(
            lambda: (
                nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2), nn.Conv2d(16, 16, 3, groups=16)),
                (numbers(4, 8, 17, 17),),
                {},
            )
        ),
    )
    yield (
        "group and instance norm",
        Program(
            lambda: (
                nn.Sequential(nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True)),
                (numbers(4, 16, 9, 9),),
                {},
            )
        ),
    )
    parametrizations = nn.utils.parametrizations
    for norm in (parametrizations.spectral_norm, parametrizations.weight_norm):
        make = functools.partial(normed, norm)
        yield norm.__name__, Program(make, {"optimizer": "adamw"})


def normed(norm: Callable[[nn.Module], nn.Module]) -> Made:
    return norm(nn.Linear(32, 32)), (numbers(8, 32),), {}


def in_channels_last() -> Made:
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    x = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last), (x,), {}


# ---- programs whose figures were published

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def published() -> Group:
    yield from attention_of_cs336()
    yield from models_of_cs336()
    yield from perceptrons()
    yield from baselines_of_liger()
    yield from others()


def table(name: str) -> list[dict[str, str]]:
    from benchmarks.published.study import DATA, read_rows

    return read_rows(DATA / name)


def attention_of_cs336() -> Group:
    from memcheck.ops.reference.cs336_attention import cs336_attention

    sizes = {(int(row["seq_len"]), int(row["d_model"])) for row in table("cs336_attention_eager_vs_compiled.csv")}
    for length, dim in sorted(sizes):
        inputs = functools.partial(tuple, [(8, length, dim)] * 3)
        make = lambda inputs=inputs: (cs336_attention, tuple(numbers(*shape) for shape in inputs()), {})  # noqa: E731
        yield f"CS336, attention {length} {dim}", Program(make, {"loss": torch.sum}, large=True)


def models_of_cs336() -> Group:
    from benchmarks.published import cs336

    runs = {(row["batch"], row["seq"]) for row in table("figures.csv") if row["source"].startswith("CS336 report")}
    for (batch, length), size in itertools.product(sorted(runs, key=str), ("medium", "xl")):
        for edition, autocast in ((2025, None), (2026, "bf16")):
            name = f"CS336, {size} of {edition}, {batch} {length} {autocast or ''}".strip()
            make = functools.partial(of_cs336, size, 0, edition, int(batch), int(length))
            yield f"{name} forward", Program(make, {"backward": False, "autocast": autocast}, large=True)
            if size == "medium":
                optimizer = cs336.AdamW if edition == 2026 else ADAMW
                how = {"optimizer": optimizer, "loss": loss_of_cs336, "autocast": autocast}
                yield f"{name} training", Program(make, how, large=True)
    for group in (2, 8):
        make = functools.partial(of_cs336, "medium", group, 2026, 1, 1024)
        how = {"optimizer": ADAMW, "loss": loss_of_cs336, "autocast": "bf16"}
        yield f"CS336, medium in groups of {group}", Program(make, how, large=True)


def of_cs336(size: str, group: int, edition: int, batch: int, length: int) -> Made:
    from benchmarks.published.cs336 import LanguageModel

    ids = (torch.empty(batch, length, dtype=torch.long) for _ in range(2))
    return WithTargets(LanguageModel(size, 10000, length, group, edition)), tuple(ids), {}


def loss_of_cs336(returned: tuple[Tensor, Tensor]) -> Tensor:
    from benchmarks.published.cs336 import cross_entropy

    return cross_entropy(*returned)


def perceptrons() -> Group:
    """Every 25th of those with norms."""
    rows = [row for row in table("mlp.csv.gz") if "batchnorm" in row["layers"] and row["outputs"] != "1"]
    for number, row in enumerate(rows[::25]):
        yield f"MLP {number}", Program(functools.partial(of_mlp, row), {"optimizer": "adam", "loss": loss_of_mlp}, True)


def of_mlp(row: dict[str, str]) -> Made:
    from benchmarks.published.mlp import layers_of

    inputs, batch = int(row["inputs"]), int(row["batch"])
    given = torch.empty(batch, inputs), torch.empty(batch, dtype=torch.int64)
    return WithTargets(layers_of(inputs, row["layers"])), given, {}


def loss_of_mlp(returned: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(*returned)


def baselines_of_liger() -> Group:
    """The layers and losses among them; the rest are scripts."""
    rows = [row for row in table("figures.csv") if row["source"].startswith("Liger-Kernel")]
    for name, config in sorted({(row["model"].split()[0], row["config"]) for row in rows}):
        make = functools.partial(of_liger, name, config)
        with torch.device("meta"):
            is_model = make() is not None
        if is_model:
            yield f"Liger, {name} {config.partition(' ')[0]}", Program(make, large=True)


def of_liger(name: str, config: str) -> Any:
    from benchmarks.published import liger

    script = liger.BASELINES[name](liger.of_config(config), "full")
    if type(script) is liger.Layer:
        return script.layer, tuple(x.detach().requires_grad_() for x in script.inputs), {}
    if type(script) is liger.Loss:
        return script.loss, (script.x.detach().requires_grad_(), *script.given()), {}
    return None


def others() -> Group:
    for name in ("phi-1.5", "llama-3.2-1b", "tiny-llama"):
        for full in (False, True):
            make = functools.partial(of_litgpt, name, full)
            how = {"optimizer": "adamw", "loss": loss_of_litgpt}
            yield f"litgpt, {name}{', full' if full else ''}", Program(make, how, large=True)
    for how in ({"attends": True, "feeds": True}, {"attends": False, "feeds": True, "needs_weights": False}):
        words = ", ".join(how)
        make = functools.partial(of_notebook, how)
        yield f"a notebook's tower: {words}", Program(make, {"optimizer": "adamw", "loss": torch.mean}, large=True)
    how = {"optimizer": functools.partial(torch.optim.AdamW, fused=True), "loss": loss_of_mlp}
    yield "torchao's ViT", Program(of_torchao, how, large=True)
    for widens in (False, True):
        make = functools.partial(of_torchtitan, widens)
        yield f"torchtitan's Llama{', wide' if widens else ''}", Program(make, {"loss": torch.mean}, large=True)


def of_litgpt(name: str, full: bool) -> Made:
    from benchmarks.published import litgpt

    config = litgpt.MODELS[name]
    model = litgpt.GPT(config if full else litgpt.replaced(config, litgpt.ALL, 32), 512).to(torch.bfloat16)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(full or "lora_" in parameter_name)
    ids = (torch.empty(1, 512, dtype=torch.long) for _ in range(2))
    return WithTargets(model, chunked=not full), tuple(ids), {}


def loss_of_litgpt(returned: tuple[Any, Tensor]) -> Tensor:
    from benchmarks.published import litgpt

    logits, targets = returned
    return (litgpt.chunked_loss if isinstance(logits, list) else litgpt.loss_of_whole)(targets, logits)


def of_notebook(how: dict[str, bool]) -> Made:
    from benchmarks.published import notebook

    tower = notebook.Tower(**how).to(torch.bfloat16)
    return tower, (torch.empty(1, notebook.LENGTH, notebook.WIDTH, dtype=torch.bfloat16),), {}


def of_torchao() -> Made:
    from benchmarks.published.others import VisionTransformer

    pictures = torch.empty(32, 3, 224, 224, dtype=torch.bfloat16)
    return WithTargets(VisionTransformer().to(torch.bfloat16)), (pictures, torch.empty(32, dtype=torch.long)), {}


def of_torchtitan(widens: bool) -> Made:
    """Two of its blocks."""
    from benchmarks.published.torchtitan import Llama

    model = Llama(32000, 11008, 8, 2048, widens)
    model.layers = model.layers[:2]
    return model, (torch.empty(1, 2048, dtype=torch.long),), {}


# ---- models of other packages, at their own sizes


def timm() -> Group:
    """Every 15th of the models in the table, with its smallest batch."""
    batches: dict[str, int] = {}
    for row in table("timm.csv"):
        batches.setdefault(row["model"], int(row["batch"]))
    for name, batch in list(batches.items())[::15]:
        how = {"optimizer": momentum, "loss": smoothed}
        yield name, Program(functools.partial(of_timm, name, batch), how, large=True)


def of_timm(name: str, batch: int) -> Made:
    from benchmarks.published.timm import numbers_on_the_cpu

    loaded().with_stubs_of_torchvision()
    with numbers_on_the_cpu():
        model = importlib.import_module("timm").create_model(name).train()
    x = torch.empty(batch, *model.default_cfg["input_size"])
    return WithTargets(model), (x, torch.zeros(batch, dtype=torch.int64)), {}


def momentum(parameters: Any) -> Any:
    from benchmarks.published.timm import momentum as of_timms_script

    return of_timms_script(parameters)


def smoothed(returned: tuple[Tensor, Tensor]) -> Tensor:
    from benchmarks.published.timm import smoothed as of_labels

    return of_labels([returned[0], returned[0], returned[1]], returned[0])


# Class and configuration, the shape of ids, and options of the configuration.
CONFIGS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", (2, 512), {}),
    "BertForMaskedLM": ("BertConfig", (4, 128), {}),
    "DistilBertForMaskedLM": ("DistilBertConfig", (4, 128), {}),
    "RobertaForMaskedLM": ("RobertaConfig", (2, 128), {}),
    "ElectraForMaskedLM": ("ElectraConfig", (2, 128), {}),
    "AlbertForMaskedLM": ("AlbertConfig", (1, 64), {}),
    "OPTForCausalLM": ("OPTConfig", (1, 256), {}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", (1, 128), {"num_hidden_layers": 4, "hidden_size": 1024}),
    "T5ForConditionalGeneration": ("T5Config", (2, 64), {"decoder_start_token_id": 0}),
    "BartForConditionalGeneration": ("BartConfig", (1, 64), {}),
    "LlamaForCausalLM": ("LlamaConfig", (1, 256), {"num_hidden_layers": 2}),
    "Qwen2ForCausalLM": ("Qwen2Config", (1, 256), {"num_hidden_layers": 2}),
    "GemmaForCausalLM": ("GemmaConfig", (1, 128), {"num_hidden_layers": 2}),
    "Phi3ForCausalLM": ("Phi3Config", (1, 128), {"num_hidden_layers": 2, "pad_token_id": 0}),
}


def transformers() -> Group:
    for name in CONFIGS:
        yield name, Program(functools.partial(of_transformers, name), {"optimizer": "adamw", "loss": own_loss}, True)


def of_transformers(name: str) -> Made:
    config, shape, options = CONFIGS[name]
    ids = torch.ones(shape, dtype=torch.long)
    # Real tokens: models look for padding.
    return loaded().of_transformers(name, config, "sdpa", **options), (), {"input_ids": ids, "labels": ids}


def own_loss(output: Any) -> Tensor:
    return output.loss


GROUPS: dict[str, Callable[[], Group]] = {
    "zoo": functools.partial(zoo, packaged=False),
    "zoo_of_packages": functools.partial(zoo, packaged=True),
    "catalog": catalog,
    "attention": attention,
    "optimizers": optimizers,
    "transforms": transforms,
    "published": published,
    "timm": timm,
    "transformers": transformers,
}
