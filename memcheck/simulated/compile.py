"""torch.compile and Triton on a simulated GPU: Dynamo and Inductor are torch's own, and no kernel is compiled.

Triton's driver and triton.compile are answered. A launch does nothing, except that what the kernel wrote is unknown.
What torch decides by timing kernels is decided by a clock of bytes and operations, with a doubt.
"""

from __future__ import annotations

import ast
import collections
import functools
import hashlib
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from memcheck.core.after_import import after_import
from memcheck.core.devices import Device, speeds
from memcheck.simulated.doubts import note
from memcheck.simulated.library import Target, library

# GB/s, TFLOP/s in 16 bits and in float32 of an H100, for devices of which they are not known.
H100 = (3350.0, 989.4, 66.9)
# How much longer a product in 16 bits is taken to last whose rows do not begin at multiples of 16 bytes, as its
# operands are read in smaller pieces. An estimate: a GPU decides by its clock.
UNALIGNED = 2.0
# torch pads if it is faster by more than this (torch/_inductor/fx_passes/pad_mm.py).
MARGIN = 1.1
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


def prepare(target: Target) -> None:
    """Answers for Triton and Inductor, each as soon as the script imports its module."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(target.device)))
    answers: dict[str, Callable[[Any], None]] = {
        "triton.compiler.compiler": answer_compiler,
        "triton.backends.nvidia.driver": answer_driver,
        "torch._C._dynamo.guards": answer_guards,
        "torch._inductor.config": set_inductor,
        "torch._functorch.config": set_functorch,
        "torch._inductor.utils": functools.partial(answer_speeds, target.device),
        "torch._inductor.fx_passes.pad_mm": functools.partial(answer_padding, target.device),
        "torch._inductor.compile_fx": doubt_choices,
    }
    for name, function in answers.items():
        when_imported(name, function)


def when_imported(name: str, function: Callable[[Any], None]) -> None:
    """Calls the function with the module, at once or as soon as it is imported."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        after_import(name, lambda: function(sys.modules[name]))


def cache_folder(device: Device) -> Path:
    """Where Inductor keeps what it generates for the device. Kernels of real runs must not meet those of this one."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "memcheck", "simulated", re.sub(r"\W+", "-", device.name))


def answer_compiler(compiler: Any) -> None:
    class Kernel(compiler.CompiledKernel):
        """A compiled kernel whose launch does nothing."""

        n_regs, n_spills, n_max_threads = 32, 0, 1024

        def __init__(self, source: Any, target: Any, options: Any) -> None:
            backend = compiler.make_backend(target)
            options = backend.parse_options(dict(options or {}, **source.parse_options()))
            key = f"{source.hash()}-{backend.hash()}-{options.hash()}"
            self.hash = hashlib.sha256(key.encode()).hexdigest()
            self.src, self.name = source, source.name
            self.metadata = metadata(self, target, options)
            self.packed_metadata: tuple[()] = ()
            self.asm: dict[str, str] = {}
            self.metadata_group: dict[str, str] = {}
            self.kernel = b""
            self.module, self.function, self._module_pid = None, 1, None
            self._writes = written_pointers(source)

        @property
        def run(self) -> Callable[..., None]:
            return self._launch

        def _launch(self, *given: Any) -> None:
            """given: the grid, the stream, five things of Triton's, and the kernel's arguments."""
            bases = (getattr(each, "base", each) for each in given[9:])  # Of descriptors and reinterpreted tensors.
            tensors = [each for each in bases if hasattr(each, "untyped_storage")]
            is_matched = len(tensors) == len(self._writes)
            for tensor, is_written in zip(tensors, self._writes if is_matched else [True] * len(tensors), strict=True):
                if is_written and tensor.is_cuda:
                    library().written(tensor.untyped_storage()._cdata)

        def _init_handles(self) -> None: ...

        def launch_metadata(self, *_: Any) -> None: ...

    def compile(src: Any, target: Any = None, options: Any = None, *_: Any, **__: Any) -> Kernel:
        driver = sys.modules["triton.runtime.driver"].driver
        return Kernel(src, target or driver.active.get_current_target(), options)

    for name in ("triton.compiler.compiler", "triton.compiler", "triton"):
        if hasattr(sys.modules.get(name), "compile"):
            sys.modules[name].compile = compile  # type: ignore[attr-defined]


def metadata(kernel: Any, target: Any, options: Any) -> Any:
    """What triton.compile says of a kernel that needs no scratch."""
    known = {
        "hash": kernel.hash,
        "target": target,
        **options.__dict__,
        "name": kernel.name,
        "shared": 1024,  # Programs divide by it.
        "tmem_size": None,
        "warp_size": 32,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
        "cluster_dims": (1, 1, 1),
    }
    return collections.namedtuple("KernelMetadata", sorted(known))(**known)


def written_pointers(source: Any) -> list[bool]:
    """Of each pointer and descriptor that the kernel is given: whether the kernel may write to it."""
    pointers = [name for name, kind in source.signature.items() if str(kind).startswith(("*", "tensordesc"))]
    try:
        written = written_names(source.fn.src)
    except SyntaxError:
        return [True] * len(pointers)
    return [name in written for name in pointers]


HARMLESS = ("load", "range", "min", "max", "float", "int")


@functools.cache
def written_names(text: str) -> frozenset[str]:
    """The parameters of a kernel of Triton from which addresses of its stores are made, or which it passes on."""
    [function] = (node for node in ast.parse(textwrap.dedent(text)).body if isinstance(node, ast.FunctionDef))
    origins = {argument.arg: {argument.arg} for argument in function.args.args}
    written: set[str] = set()

    def origins_of(*nodes: ast.AST) -> set[str]:
        """Parameters of which these are addresses; a loaded number is none."""
        found: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Call) and name_of(node.func) == "load":
                continue
            found |= origins.get(node.id, set()) if isinstance(node, ast.Name) else set()
            found |= origins_of(*ast.iter_child_nodes(node))
        return found

    for _ in range(2):  # A second time for what loops pass on.
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                found = origins_of(node.value)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
                        origins.setdefault(name, set()).update(found)
            elif isinstance(node, ast.Call):
                name = name_of(node.func)
                if name == "store" or name.startswith("atomic_"):
                    written |= origins_of(node.func, *node.args[:1])
                # Python's functions, those of triton.language, such as tl.make_block_ptr, and methods write nothing.
                elif not isinstance(node.func, ast.Attribute) and name not in HARMLESS:
                    written |= origins_of(*node.args, *(each.value for each in node.keywords))
    return frozenset(written)


def name_of(function: ast.expr) -> str:
    """The last part of a function's name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def answer_driver(driver: Any) -> None:
    class Utils:
        """CudaUtils of Triton, without libcuda. The rest of its driver asks torch.cuda."""

        def get_device_properties(self, device: int) -> dict[str, int]:
            found = sys.modules["torch"].cuda.get_device_properties(device)
            return {
                "max_shared_mem": found.shared_memory_per_block_optin,
                "multiprocessor_count": found.multi_processor_count,
                "max_num_regs": found.regs_per_multiprocessor,
                "warpSize": found.warp_size,
                "sm_clock_rate": found.clock_rate,
                "mem_clock_rate": found.memory_clock_rate,
                "mem_bus_width": found.memory_bus_width,
            }

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    driver.CudaUtils = Utils


def answer_guards(guards: Any) -> None:
    def empty_strided(size: Any, stride: Any, dtype: Any) -> Any:
        """A buffer of generated code."""
        return sys.modules["torch"].empty_strided(size, stride, dtype=dtype, device="cuda")

    guards._empty_strided_cuda = empty_strided


def set_inductor(config: Any) -> None:
    config.compile_threads = 1  # Other processes would not know the answers.
    if hasattr(config, "use_static_triton_launcher"):
        config.use_static_triton_launcher = False
    if hasattr(config, "use_static_cuda_launcher"):
        config.use_static_cuda_launcher = False


def set_functorch(config: Any) -> None:
    config.enable_autograd_cache = False  # What is decided before Inductor's graph is decided each time.


def answer_speeds(device: Device, utils: Any) -> None:
    bandwidth, in_16_bits, in_float32 = speeds(device.name) or H100
    utils.get_gpu_dram_gbps = lambda: bandwidth
    utils.get_device_tflops = lambda dtype: in_16_bits if dtype.itemsize == 2 else in_float32


def answer_padding(device: Device, pad_mm: Any) -> None:
    def should_pad(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
        """Whether a product is padded, by its bytes and operations. A GPU would time both."""
        if not pad_mm.can_pad(mat1, mat2, op, input):
            return False
        m, k, n = sizes = [hint(size) for size in (*mat1.shape[-2:], mat2.shape[-1])]
        if not pad_mm.is_mm_compute_bound(m, k, n, mat1.dtype):
            return False
        aligned = [size + pad_mm.get_padded_length(size, pad_mm.get_alignment_size(mat1)) for size in sizes]
        pads = padding_pays(device, sizes, aligned, mat1.dtype.itemsize)
        note(
            f"torch.compile {'pads' if pads else 'does not pad'} the product {m} x {k} x {n}, by its bytes and "
            "operations; a GPU times both"
        )
        return pads

    pad_mm.should_pad = should_pad


def hint(size: Any) -> int:
    return int(size.node.hint) if hasattr(size, "node") else int(size)


def padding_pays(device: Device, sizes: Sequence[int], aligned: Sequence[int], itemsize: int) -> bool:
    """Whether copies of the operands that grow and the aligned product take less time than the product as it is.

    Products in float32 stay as they are. sizes, aligned: m, k and n.
    """
    if itemsize != 2:
        return False
    bandwidth, in_16_bits, _ = speeds(device.name) or H100
    m, k, n = sizes
    grows = [size != padded for size, padded in zip(sizes, aligned, strict=True)]
    copied = (m * k if grows[0] or grows[1] else 0) + (k * n if grows[1] or grows[2] else 0)
    product = max(2 * m * k * n / (in_16_bits * 1e12), (m * k + k * n + m * n) * itemsize / (bandwidth * 1e9))
    return UNALIGNED * product > MARGIN * (product + 2 * copied * itemsize / (bandwidth * 1e9))


def doubt_choices(compile_fx: ModuleType) -> None:
    """Notes that all kernels of a product take the same time here: the first, which is that of cuBLAS, is taken."""
    inner = getattr(compile_fx, "_compile_fx_inner", None)
    if inner is None:
        return

    @functools.wraps(inner)
    def compile_and_note(graph: Any, *args: Any, **kwargs: Any) -> Any:
        config: Any = sys.modules["torch._inductor.config"]
        if config.max_autotune or config.max_autotune_gemm:
            names = {getattr(node.target, "_opname", "") for node in graph.graph.nodes}
            if names & set(PRODUCTS):
                note("max-autotune takes the kernels of cuBLAS and cuDNN, whose memory others may not need")
        return inner(graph, *args, **kwargs)

    compile_fx._compile_fx_inner = compile_and_note  # type: ignore[attr-defined]
