"""Runs the prototypes of kernels in this folder on a GPU, and writes a row for each to kernels.jsonl.

    make kernels                          compiles them with nvcc; needs no GPU
    python benchmarks/kernels/trial.py    needs a GPU, and neither memcheck's extension nor its build

The prototypes are for linear attention in bfloat16 with D = 128: forward, backward in two scans, and a step of
decoding. A row has relative errors (root mean square) against float64, whether a second run gives the same bits, and
the median time. `rounding` is the error of the truth itself, rounded to bfloat16. Beside them are the ceilings of this
machine, and what library calls take that do the same for attention that is not causal.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_harness import Row, ceilings, clock_of, results_folder, seconds  # noqa: E402

from memcheck.ops.reference.linear_attention import features, linear_attention  # noqa: E402

LIBRARY = ROOT / "build/kernels/trial.so"
EPS = 1e-6
D = 128
FORWARD = [(chunk, blocks) for chunk in (32, 64) for blocks in (1, 2)]

# ---- calls


class Prototypes:
    """The library's functions, with tensors (heads,T,128) of a GPU, or of the host if it was compiled for that."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._library = ctypes.CDLL(str(path))

    def _call(self, name: str, *arguments: Tensor | int | float) -> None:
        on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in arguments)
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        kinds = {Tensor: lambda x: ctypes.c_void_p(x.data_ptr()), int: ctypes.c_int, float: ctypes.c_float}
        passed = [kinds[type(x)](x) for x in arguments]
        if getattr(self._library, name)(*passed, ctypes.c_void_p(stream)) != 0:
            raise RuntimeError(f"{name}: the launch failed")

    def forward(self, chunk: int, blocks: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = torch.empty_like(v)
        self._call("trial_linear_forward", q, k, v, y, q.shape[0], q.shape[1], EPS, chunk, blocks)
        return (y,)

    def backward(self, parts: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        rows = q.new_empty(*q.shape[:2], 2, dtype=torch.float32)
        self._call("trial_linear_backward", q, k, v, g, *gradients, rows, q.shape[0], q.shape[1], EPS, parts)
        return gradients

    def step(self, q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        y, new_S, new_z = torch.empty_like(q), torch.empty_like(S), torch.empty_like(z)
        self._call("trial_linear_step", q, k, v, S, z, new_S, new_z, y, q.shape[0], EPS)
        return y, new_S, new_z


# ---- truth, in float64


def true_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (linear_attention(*(x.double()[None] for x in (q, k, v)), causal=True, eps=EPS)[0],)


def true_backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(true_forward(*leaves), leaves, (g.double(),))


def true_step(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    phi_q, phi_k = features(q.double()), features(k.double())
    S, z = S.double() + phi_k[..., None] * v.double()[..., None, :], z.double() + phi_k
    y = (phi_q[..., None, :] @ S)[..., 0, :] / ((phi_q * z).sum(-1, keepdim=True) + EPS)
    return y, S, z


def relative(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm()).item()


# ---- inputs


def sequences(heads: int, T: int, device: str, mean: float = 0.0, count: int = 3) -> list[Tensor]:
    """q, k, v and the gradient of y."""
    found = [torch.randn(heads, T, D, device=device, dtype=torch.bfloat16) for _ in range(count)]
    found[2] += mean
    return found


def states(heads: int, device: str, mean: float) -> list[Tensor]:
    """q, k and v of a position, and a state of about 40 positions."""
    of_position = [torch.randn(heads, D, device=device, dtype=torch.bfloat16) for _ in range(3)]
    of_position[2] += mean
    return [
        *of_position,
        40 * mean + 6 * torch.randn(heads, D, D, device=device),
        40 + torch.rand(heads, D, device=device),
    ]


# ---- rows

Run = Callable[..., tuple[Tensor, ...]]


def kernels(prototypes: Prototypes) -> Iterator[tuple[str, Run, Run, Sequence[str]]]:
    """A name, the prototype, the truth, and the names of its results."""
    for chunk, blocks in FORWARD:
        run = functools.partial(prototypes.forward, chunk, blocks)
        yield f"linear forward, chunks of {chunk}, {blocks} blocks", run, true_forward, ["y"]
    for parts in (1, 2):
        run = functools.partial(prototypes.backward, parts)
        yield f"linear backward, S in {parts} parts", run, true_backward, ["grad_q", "grad_k", "grad_v"]
    yield "linear step", prototypes.step, true_step, ["y", "S", "z"]


def inputs_of(name: str, heads: int, T: int, device: str, mean: float = 0.0) -> list[Tensor]:
    if "step" in name:
        return states(heads, device, mean)
    return sequences(heads, T, device, mean, 4 if "backward" in name else 3)


def errors(
    prototypes: Prototypes, heads: int, T: int, device: str, means: Sequence[float] = (0.0, 3.0)
) -> Iterator[Row]:
    """A row for every prototype and mean of the values; with a mean, terms of grad_q cancel."""
    for name, run, truth, names in kernels(prototypes):
        for mean in means:
            inputs = inputs_of(name, heads, T, device, mean)
            results, truths, again = run(*inputs), truth(*inputs), run(*inputs)
            yield {
                "what": name,
                "mean of v": mean,
                "error": {x: relative(*pair) for x, *pair in zip(names, results, truths, strict=True)},
                "rounding": {
                    x: relative(true.to(y.dtype), true) for x, y, true in zip(names, results, truths, strict=True)
                },
                "same bits": all(map(torch.equal, results, again)),
            }


def library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    phi_q, phi_k = features(q), features(k)
    z = phi_k.sum(-2, keepdim=True, dtype=torch.float32)
    return (phi_q @ (phi_k.mT @ v)) / ((phi_q.float() * z).sum(-1, keepdim=True) + EPS).to(q.dtype)


def times(prototypes: Prototypes) -> Iterator[Row]:
    """A row for every prototype at 4 x 64 heads and T = 4096, and for what library calls take, or why one failed."""
    q, k, v = sequences(256, 4096, "cuda")
    S = torch.randn(256, D, D, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "linear forward, not causal, by torch.matmul": lambda: library(q, k, v),
        "the same, compiled": functools.partial(torch.compile(library), q, k, v),
        "k^T v alone": lambda: k.mT @ v,
        "q S alone": lambda: q @ S,
    }
    for name, run, *_ in kernels(prototypes):
        calls[name] = functools.partial(run, *inputs_of(name, 512 if "step" in name else 256, 4096, "cuda"))
    for name, call in calls.items():
        try:
            yield {"what": name, "ms": 1e3 * seconds(clock_of("cuda"), call, 30)}
        except Exception as error:
            yield {"what": name, "failed": " ".join(str(error).split())[:300]}


def rows(prototypes: Prototypes) -> Iterator[Row]:
    yield {"what": "ceilings", **ceilings("cuda", small=False)}
    yield from errors(prototypes, 4, 1024, "cuda")
    yield from times(prototypes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: where make gpu writes")
    parser.add_argument("--launch", action="store_true", help="runs every prototype once, for a profiler")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: torch sees none", file=sys.stderr)
        return 1
    prototypes = Prototypes()
    if arguments.launch:
        for name, run, *_ in kernels(prototypes):
            run(*inputs_of(name, 256, 4096, "cuda"))
        torch.cuda.synchronize()
        return 0
    folder: Path = arguments.output or results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with (folder / "kernels.jsonl").open("w") as file:
        for row in rows(prototypes):
            line = json.dumps({"gpu": torch.cuda.get_device_name(), **row})
            print(line, file=file, flush=True)
            print(line, flush=True)
            failed |= row.get("same bits") is False or "failed" in row
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
