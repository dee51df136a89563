"""Compiled programs without their device: Dynamo, AOTAutograd and Inductor run, and no kernel is compiled.

The code that Inductor generates allocates, frees and reuses buffers by itself. Here it runs on meta tensors under an
AllocationMode, as eager code does. Its kernels are stubs.

Dynamo refuses to compile under a mode. So a step runs twice: `compile_before` without modes, in which all is compiled,
and then under the modes, where the guards of compiled code would fail because of them. They are skipped, and a call
finds its code by the shapes of its arguments instead.

For a process of its own: it replaces functions of torch for good. On a GPU that is not there, see pretended_gpu.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_flatten

from memcheck.core.devices import Device, running, speeds
from memcheck.core.prediction import Prediction
from memcheck.core.record import Certainty, Doubt
from memcheck.core.step import Place
from memcheck.core.tensors import gradients_for
from memcheck.core.units import format_bytes
from memcheck.core.workload import Left, Workload
from memcheck.predict import sdpa
from memcheck.predict.allocation_mode import AllocationMode
from memcheck.predict.autocast import key_for, run_backward
from memcheck.predict.model import highest_bytes
from memcheck.predict.pretended_gpu import LIBRARY
from memcheck.predict.replay import target_at

# Products of which a GPU would time a padded and a plain one (torch/_inductor/fx_passes/pad_mm.py), since it was
# cleared, and whether these are padded here.
TIMED: dict[str, None] = {}
PADS = [False]
DEVICE: list[str] = []  # The kind that this process compiles for.


class Stub:
    """Stands for a compiled kernel: it writes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> None: ...

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def precompile(self, *_: Any, **__: Any) -> None: ...

    def prepare_for_pickle(self) -> tuple[()]:
        return ()


def empty_on_meta(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A buffer of generated code."""
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def prepare(device: Device) -> None:
    """From now on, this process compiles for the device without it."""
    kind = device.kind
    DEVICE.append(kind)
    import torch._dynamo.config
    import torch._inductor.async_compile
    import torch._inductor.config

    compiler: Any = torch._inductor.async_compile.AsyncCompile
    compiler.triton = lambda self, name, source, device_str="cuda": Stub(name)
    compiler.multi_kernel = lambda self, name, *_, **__: Stub(name)
    compiler.cpp_pybinding = lambda self, types, source: Stub("cpp")
    compiler.cpp = lambda self, source: Stub("cpp")
    compiler.wait = lambda self, scope: None
    functions: Any = torch._C._dynamo.guards
    setattr(functions, f"_empty_strided_{kind}", empty_on_meta)
    if kind == "cpu":  # Kernels for meta tensors know no layouts of oneDNN.
        functions.assert_size_stride = lambda *_, **__: None
    else:
        fold_on_cpu()
        decide_padding(device)
        choose_attention_for(device)
    follow_random_states(kind)
    lie_on(torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu"))
    torch._inductor.config.compile_threads = 1
    # What is decided before Inductor's graph, such as padding, is decided each time.
    torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache = True, False
    torch._inductor.config.cpp.vec_isa_ok = True  # No test of vector instructions is compiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    torch.compile = compile_by_shapes


def follow_random_states(kind: str) -> None:
    """Checkpoints in compiled code keep the random state of the device, as torch/_prims/rng_prims.py does it."""
    from torch._prims import rng_prims

    torch._functorch.config.graphsafe_rng_functionalization = False  # It asks the GPU's generator, and takes as much.
    rng_prims.get_device = lambda args, kwargs: kind
    random_state = torch.get_rng_state if kind == "cpu" else torch.cuda.get_rng_state

    @rng_prims.run_and_save_rng_state.py_impl(AllocationMode)
    def run_and_save(mode: AllocationMode, op: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return random_state(), op(*args, **kwargs)

    @rng_prims.run_with_rng_state.py_impl(AllocationMode)
    def run_with(mode: AllocationMode, state: Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            _current = random_state()
            return op(*args, **kwargs)

    for operator in (rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state):
        operator.fallthrough(key_for(kind))


class Laid(NamedTuple):
    """What the choice of an attention asks of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype | None
    requires_grad: bool

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def stride(self, dim: int) -> int:
        return self.strides[dim]


# at::SDPBackend (aten/src/ATen/SDPBackend.h) and c10::ScalarType (c10/core/ScalarType.h).
SDP_BACKENDS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
SCALAR_TYPES = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}


def choose_attention_for(device: Device) -> None:
    """torch's F.scaled_dot_product_attention takes the backend that the GPU would take, by the rules of sdpa.py."""
    target = target_at(Place(device))

    @ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
    def choice(numbers: Any) -> int:
        given = numbers[:29]
        dtype, (has_mask, causal, grouped, trains) = SCALAR_TYPES.get(given[24]), map(bool, given[25:])
        q, k, v = (Laid(tuple(given[at : at + 4]), tuple(given[at + 4 : at + 8]), dtype, trains) for at in (0, 8, 16))
        mask: Any = q if has_mask else None
        call = sdpa.Attention(cast(Any, q), cast(Any, k), cast(Any, v), mask, causal, 0.0, None, grouped=grouped)
        return next((SDP_BACKENDS[name] for name in sdpa.cuda_order(target) if sdpa.takes(name, call, target)), -1)

    LIBRARIES.append(choice)
    LIBRARY[0].memcheck_choose_attention_by(choice)


def lie_on(device: torch.device) -> None:
    """Fake tensors of meta tensors, which the compiler works with, lie on the device."""
    from torch._subclasses.fake_tensor import FakeTensor

    made = FakeTensor.__new__

    def moved(place: Any) -> Any:
        return device if place is not None and torch.device(place).type == "meta" else place

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        args = (*args[:2], moved(args[2]), *args[3:]) if len(args) > 2 else args
        return made(cls, *args, **{k: moved(v) if k in ("device", "fake_device") else v for k, v in kwargs.items()})

    FakeTensor.__new__ = staticmethod(new)  # type: ignore[method-assign]


def fold_on_cpu() -> None:
    """Constants are folded by small factories on the device; their results lie on the CPU here."""

    def empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    LIBRARIES.append(library := torch.library.Library("aten", "IMPL", "CUDA"))
    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)


LIBRARIES: list[Any] = []  # An implementation lives as long as its library, and torch's C++ calls the choice.


def decide_padding(device: Device) -> None:
    """PADS decides about the products that a GPU would time, which are those that its arithmetic bounds; it notes them.

    What the GPU's memory and arithmetic can do is that of its data sheet, or if it is not known, of an H100.
    """
    import torch._inductor.fx_passes.pad_mm as pad_mm
    import torch._inductor.utils

    utils: Any = torch._inductor.utils
    bandwidth, of_tensor_cores, of_others = speeds(device.name) or speeds("H100-80GB-SXM") or (3350, 989.4, 66.9)
    utils.get_device_tflops = lambda dtype: of_others if dtype in (torch.float32, torch.float64) else of_tensor_cores
    utils.get_gpu_dram_gbps = lambda: bandwidth
    bound: Any = pad_mm.is_mm_compute_bound

    def should_pad(match: Any, mat1: Tensor, mat2: Tensor, op: Any, input: Any = None) -> bool:
        m, k, n = (*mat1.shape[-2:], mat2.shape[-1])
        if pad_mm.can_pad(mat1, mat2, op, input) and bound(m, k, n, mat1.dtype):
            TIMED[f"{m} x {k} x {n}"] = None
            return PADS[0]
        return False

    pad_mm.should_pad = should_pad


# Operators that Inductor writes from templates, whose scratch was not compared with measurements.
TEMPLATES = ("flex_attention", "flex_attention_backward", "triton_kernel_wrapper_mutation")
TORCH_COMPILE: Any = torch.compile
# What was compiled, by the function and the settings: a model may call torch.compile in its forward. KNOWN: of what.
CODES: dict[Any, dict[Any, Any]] = {}
KNOWN: set[Any] = set()


class RefusedError(NotImplementedError):
    """What torch.compile is asked for is not predicted."""


def compile_by_shapes(model: Any = None, **how: Any) -> Any:
    """torch.compile, but each call runs the code that was compiled for arguments of its shapes, without guards.

    A module is compiled in place, as torch.compile compiles the module that it returns.
    """
    if model is None:
        return functools.partial(compile_by_shapes, **how)
    if not isinstance(model, torch.nn.Module):
        return by_shapes(model, how)
    # As in OptimizedModule._initialize (torch/_dynamo/eval_frame.py): Dynamo enters no frame of torch's own modules.
    call = model._call_impl
    if isinstance(model.forward, MethodType) and torch._dynamo.trace_rules.check(model.forward):
        call = torch._dynamo.external_utils.wrap_inline(call)
    model._compiled_call_impl = by_shapes(call, how, owner=model, again=compile_by_shapes)
    return model


def by_shapes(
    function: Callable[..., Any], how: dict[str, Any], owner: Any = None, again: Any = torch.nn.Module.compile
) -> Any:
    """The function, compiled. owner: the module whose call it is. again: compiles a copy of the module as this one."""
    if how.get("disable"):
        return function
    owner = owner or getattr(function, "__self__", None)
    KNOWN.add(name := (function, repr(how)))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # It becomes a part of what is compiled.
            return function(*args, **kwargs)
        codes = CODES.setdefault(name, {})
        key = call_key(owner, args, kwargs)
        if isinstance(owner, torch.optim.Optimizer) and makes_state(owner, codes):
            return function(*args, **kwargs)
        if key not in codes:
            if torch._C._len_torch_dispatch_stack():  # The modes of a traced step.
                raise NotImplementedError("compiled code is called in another way than in the step before")
            codes[key] = TORCH_COMPILE(
                function,
                fullgraph=how.get("fullgraph", False),
                dynamic=False,
                backend=backend_of(how),
                options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
                isolate_recompiles=True,  # Each of these has codes of its own.
            )
        try:
            return codes[key](*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as failed:
            raise failed.inner_exception from None

    run.again = functools.partial(again, **how)  # type: ignore[attr-defined]
    return run


def makes_state(optimizer: torch.optim.Optimizer, codes: dict[Any, Any]) -> bool:
    """Whether a traced step is the optimizer's first, in which Dynamo has it make its state before the code runs.

    Dynamo moves counters of steps to the GPU (OptimizerVariable.move_step_if_cpu in torch/_dynamo/variables).
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    if DEVICE[0] == "cuda":
        for parameter, own in optimizer.state.items():
            if isinstance(step := own.get("step"), Tensor) and step.device != parameter.device:
                own["step"] = step.to(parameter.device)
    return not optimizer.state and any(modes for _, _, modes, _ in codes)


def reduced(thing: Any) -> Any:
    """How pickle sends what torch.compile made: as what it was made of, to be compiled there. Else NotImplemented."""
    if isinstance(thing, torch._dynamo.OptimizedModule):
        return compiled_again, (thing._orig_mod, settings_of(thing.dynamo_ctx))
    if isinstance(thing, torch.nn.Module) and thing._compiled_call_impl is not None:
        state = thing.__getstate__(), settings_of(thing._compiled_call_impl)
        return copyreg.__newobj__, (type(thing),), state, None, None, set_state  # type: ignore[attr-defined]
    if isinstance(thing, FunctionType) and hasattr(thing, "_torchdynamo_orig_callable"):
        return compiled_again, (thing._torchdynamo_orig_callable, settings_of(thing))
    return NotImplemented


def compiled_again(model: Any, how: dict[str, Any]) -> Any:
    return torch.compile(model, **how)


def set_state(module: torch.nn.Module, state: Any) -> None:
    own, how = state
    module.__setstate__(own)
    module.compile(**how)


def settings_of(compiled: Any) -> dict[str, Any]:
    """The arguments of torch.compile that made it: a function, or the context of a module."""
    if isinstance(compiled, FunctionType):
        cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
        compiled = cells["self"].cell_contents
    backend = compiled.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    how = {"fullgraph": bool(compiled.fullgraph), "dynamic": compiled._dynamic}
    if isinstance(backend, torch._TorchCompileInductorWrapper):
        return how | {"options": dict(backend.config)}
    return how | {"backend": getattr(backend, "compiler_fn", backend)}


def call_key(owner: Any, args: Any, kwargs: Any) -> Any:
    """What the compiled code of a call depends on, as guards would check it."""
    leaves, structure = tree_flatten((args, kwargs))
    modes: tuple[Any, ...] = ()
    if isinstance(owner, torch.nn.Module):
        modes = tuple(part.training for part in owner.modules())
    elif isinstance(owner, torch.optim.Optimizer):  # It makes its state when it steps first.
        modes = tuple(tuple(own) for own in owner.state.values())
    autocast = torch.is_autocast_enabled(DEVICE[0]) and torch.get_autocast_dtype(DEVICE[0])
    state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
    return structure, tuple(map(leaf_key, leaves)), modes, state


def leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return described(leaf), leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | bool | None | torch.dtype) else id(leaf)


def described(leaf: Any) -> Any:
    """Shape, strides and dtype of a tensor; any other leaf is itself."""
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def backend_of(how: dict[str, Any]) -> Callable[..., Any]:
    """The backend that arguments of torch.compile ask for. What it compiles refuses inputs of other shapes.

    NotImplementedError: what it allocates is not known.
    """
    mode, options, backend = (how.get(name) for name in ("mode", "options", "backend"))
    inner: Any
    if backend in (None, "inductor"):
        inner = torch._TorchCompileInductorWrapper(mode or (None if options else "default"), options or None, False)
        for name in ("triton.cudagraphs", "max_autotune", "coordinate_descent_tuning"):
            if inner.config.get(name):
                raise RefusedError(f"what torch.compile allocates with {name} is not predicted")
    else:
        inner = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
    if how.get("dynamic"):
        raise RefusedError("what torch.compile(dynamic=True) allocates is not predicted")

    def compile_graph(graph: Any, inputs: Any) -> Any:
        for called in (node.target for node in graph.graph.nodes):
            if isinstance(called, HigherOrderOperator) and called.name() in TEMPLATES:
                raise RefusedError(f"what {called.name()} allocates under torch.compile is not predicted")
        expected = list(map(described, inputs))
        code = inner(graph, inputs)

        def run(*given: Any) -> Any:
            if list(map(described, given)) != expected:
                raise NotImplementedError("compiled code meets other shapes than those that it was compiled for")
            return code(*given)

        return run

    return compile_graph


def compile_before(workload: Workload, dense_grad: bool) -> None:
    """Runs the steps of a workload once without modes, so that all that they call is compiled.

    Attributes of the module and the optimizers are afterwards what they were, as the traced steps begin anew.
    """
    owners = [*(workload.module.modules() if workload.module is not None else ()), *workload.optimizers]
    attributes = [(owner.__dict__, {name: copied(part) for name, part in owner.__dict__.items()}) for owner in owners]
    try:
        compile_steps(workload, dense_grad)
    finally:
        for own, before in attributes:
            own.clear()
            own.update(before)


def copied(part: Any) -> Any:
    """A copy of an attribute's dict or list, and of dicts and lists in it, as modules and optimizers have them."""
    if type(part) in (dict, defaultdict):
        copy = part.copy()
        copy.update((key, copied(value)) for key, value in part.items())
        return copy
    return [copied(each) for each in part] if type(part) is list else part


def compile_steps(workload: Workload, dense_grad: bool) -> None:
    for step in (*workload.earlier, workload):
        with torch.set_grad_enabled(step.backward):
            returned = step.forward(DEVICE[0], Left())
        if step.backward and returned.roots:
            before = [(leaf, leaf.grad) for leaf in leaves_of(returned.roots)]
            run_backward(returned.roots, gradients_for(returned.roots, dense_grad))
            if step.optimizer_step is not None and KNOWN - CODES.keys():
                compile_optimizer(step.optimizer_step)
            for leaf, gradient in before:
                leaf.grad = gradient


def compile_optimizer(step: Callable[[], Any]) -> None:
    """Runs its first step, and a later one, as far as it runs without modes. What it lacks the traced step says."""
    for _ in range(2):
        try:
            step()
        except RefusedError:
            raise
        except Exception:
            return


def leaves_of(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors whose gradients a backward from these adds to, whoever holds them."""
    waiting, seen = [root.grad_fn for root in roots], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(leaf := getattr(node, "variable", None), Tensor):  # Of an AccumulateGrad.
                yield leaf
            waiting += [following for following, _ in node.next_functions]


def in_both_ways(predict: Callable[[], Prediction]) -> Prediction:
    """The prediction, with a doubt about what only the GPU decides: the higher of those without and with padding."""
    found = []
    for PADS[0] in (False, True):
        torch._dynamo.reset()
        CODES.clear()
        TIMED.clear()
        found.append(predict())
        if not TIMED:
            break
    plain, highest = found[0], max(found, key=lambda one: (one.record.status == "oom", highest_bytes(one)))
    record, version = highest.record, highest.place.torch_version
    if highest_bytes(plain) != highest_bytes(found[-1]):
        low, high = sorted(map(format_bytes, map(highest_bytes, found)))
        words = f"torch.compile times on the GPU whether it pads {len(TIMED)} products, such as {next(iter(TIMED))}"
        record.doubts += (Doubt(f"{words}: the peak is between {low} and {high}; the higher one is shown"),)
    if version is not None and version != running() and record.status in ("ok", "oom"):
        record.doubts += (Doubt(f"the code was generated by torch {torch.__version__}, which runs here"),)
    if record.certainty is Certainty.EXACT and DEVICE[0] == "cuda":
        record.certainty = Certainty.VERIFIED
    return highest
