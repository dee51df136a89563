"""Counts the instructions that a warp of a CUDA kernel executes for a position, by the machine code for 9.0.

python tests/host_cuda/machine_code.py          of forward and backward in bfloat16, without decays and states
python tests/host_cuda/machine_code.py --paths  and the blocks of instructions that it counts

Of the branches it takes those that work: of all paths through the code it finds the one with most work for the fewest
other instructions. A branch that only some lanes or some warps take, or only the ends of a tensor, is left out if it
does no work. It needs nvcc, and nvdisasm of CUDA or of Triton.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from host_cuda.resources import CSRC, FLAGS, demangled, fingerprint, spelled_alike  # noqa: E402

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?U?P\w+ )?\s*(?P<name>[A-Z0-9_.]+)(?P<rest>.*)")
LABEL = re.compile(r"\.L_x_\d+")
# A product of matrices and its factors, a special function, a copy, a store, rounding to bfloat16, a barrier.
WORK = re.compile(r"HMMA|LDSM|MUFU\.(EX2|RCP)|LDGSTS|STG\.E\.(U16|128)|F2FP|BAR\.SYNC")
# So many other instructions are worth one that works.
WORTH = 25


@dataclass(frozen=True)
class Counted:
    """A kernel. positions: those for which a warp runs the loop over chunks once, by the number of warps; or those of
    a thread that runs all of the code once. trips(names): how often an inner loop runs that has instructions of these
    names, on average over the warps. copies: the places in the code that ask for copies, of which there are more for
    other layouts and numbers of stages."""

    title: str
    source: str
    kernel: str
    positions: float
    in_loop: bool
    trips: Callable[[list[str]], float] = lambda names: 1.0
    copies: int = 1

    @property
    def each(self) -> str:
        return "a position" if self.in_loop else "an element"


def trips(tensors: int, jobs: float) -> Callable[[list[str]], float]:
    """A loop that copies takes each tensor once, and one that multiplies a warp's share of the scores."""

    def of(names: list[str]) -> float:
        return tensors if any(name.startswith("LDGSTS") for name in names) else jobs

    return of


def linear(title: str, file: str, kernel: str, tensors: int, jobs: float) -> Counted:
    source = f"linear_attention/linear_attention_{file}_cuda.cu"
    name = f"linear_cuda::{kernel}<linear_cuda::Traits<__nv_bfloat16, 128, 64, 0> >"
    return Counted(title, source, name, 64 / 8, True, trips(tensors, jobs))


KERNELS = [
    linear("linear attention, forward", "forward", "forward_kernel", 3, 10 / 8),
    linear("linear attention, grad_q", "backward_q", "query_gradient_kernel", 4, 10 / 8),
    linear("linear attention, grad_k and grad_v", "backward_kv", "key_gradient_kernel", 4, 20 / 8),
    Counted(
        "softplus attention, forward",
        "softplus_attention/softplus_attention_forward_cuda.cu",
        "softplus_cuda::forward_causal_kernel<0, __nv_bfloat16>",
        16,
        False,
        copies=2,
    ),
]


@dataclass
class Block:
    """Instructions that run one after another, and the numbers of the blocks that may be next."""

    first: int
    names: list[str]
    last: str = ""
    next: list[int] = field(default_factory=list)
    runs: float = 1.0

    @cached_property
    def copies(self) -> bool:
        return any(name.startswith("LDGSTS") for name in self.names)

    @cached_property
    def score(self) -> float:
        worth = sum(WORTH for name in self.names if WORK.match(name))
        return worth - len(self.names)


def blocks_of(lines: list[str]) -> list[Block]:
    """Returns the blocks of a function, in their order in memory."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str, str]] = []
    for line in lines:
        if line.startswith(".L_x_"):
            labels[line.split(":")[0]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((found["name"], found["predicate"] or "", found["rest"]))
    ends = {i + 1 for i, (name, _, _) in enumerate(code) if name.startswith(("BRA", "EXIT", "RET", "BSYNC", "BRX"))}
    cuts = sorted({0, len(code), *labels.values(), *ends})
    blocks = [Block(first, [name for name, _, _ in code[first:end] if name != "NOP"]) for first, end in pairwise(cuts)]
    number = {block.first: i for i, block in enumerate(blocks)}
    meets: dict[str, str] = {}
    for i, block in enumerate(blocks):
        end = blocks[i + 1].first if i + 1 < len(blocks) else len(code)
        for name, _, rest in code[block.first : end]:
            if name.startswith("BSSY"):
                meets[rest.split()[0].rstrip(",")] = LABEL.search(rest)[0]  # type: ignore[index]
        name, predicate, rest = code[end - 1]
        target = LABEL.search(rest)
        block.last = f"{predicate}{name}{rest.split(';')[0]}"
        conditional = bool(predicate) or name.startswith(("BRA.DIV", "BRA.CONV")) or "!UPT" in rest
        conditional |= name.startswith("BRA") and bool(re.match(r"\s*!?U?P\d", rest))
        if name.startswith("BRA") and target:
            block.next.append(number[labels[target[0]]])
        elif name.startswith("BSYNC"):
            block.next.append(number[labels[meets[rest.split()[0].rstrip(";")]]])
        ends_here = name.startswith(("BRA", "EXIT", "RET", "BSYNC")) and not conditional
        if not ends_here and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def order_and_loops(blocks: list[Block], entry: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the blocks that are reached, each before those it leads to, and the edges that go back: (from, to)."""
    state: dict[int, int] = {entry: 1}
    done: list[int] = []
    back: list[tuple[int, int]] = []
    stack = [(entry, iter(blocks[entry].next))]
    while stack:
        at, left = stack[-1]
        for to in left:
            if state.get(to) == 1:
                back.append((at, to))
            elif to not in state:
                state[to] = 1
                stack.append((to, iter(blocks[to].next)))
                break
        else:
            state[at] = 2
            done.append(at)
            stack.pop()
    return done[::-1], back


def inside(blocks: list[Block], back: tuple[int, int]) -> set[int]:
    """Returns the blocks of the loop that an edge closes."""
    before: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        for to in block.next:
            before.setdefault(to, []).append(i)
    found, left = {back[1]}, [back[0]]
    while left:
        at = left.pop()
        if at not in found:
            found.add(at)
            left += before.get(at, [])
    return found


def best_path(blocks: list[Block], counted: Counted) -> list[Block]:
    """Returns the blocks of the path with most work, each with how often it runs."""
    order, back = order_and_loops(blocks, 0)
    loops = {edge: inside(blocks, edge) for edge in back}

    def products(loop: set[int]) -> int:
        return sum(name.startswith("HMMA") for i in loop for name in blocks[i].names)

    closing = max(back, key=lambda edge: products(loops[edge])) if counted.in_loop else None
    body = loops[closing] if closing else set(order)
    # Edges from several blocks may close one loop.
    inner: dict[int, set[int]] = {}
    for edge, loop in loops.items():
        if loop < body and (closing is None or edge[1] != closing[1]):
            inner[edge[1]] = inner.get(edge[1], set()) | loop
    for loop in inner.values():
        names = [name for i in loop for name in blocks[i].names]
        for i in loop:
            blocks[i].runs *= counted.trips(names)
    ends = {closing[0]} if closing else {i for i in order if "EXIT" in blocks[i].last}
    goes_back = set(back)
    # The best score from a block on, and the next block, for each number of copies that are left.
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for i in reversed([i for i in order if i in body]):
        for left in range(counted.copies + 1):
            after = left - blocks[i].copies
            onward = [
                (best[to, after][0], to) for to in blocks[i].next if (to, after) in best and (i, to) not in goes_back
            ]
            if i in ends and after == 0:
                onward.append((0.0, -1))
            if onward:
                value, to = max(onward)
                best[i, left] = (value + blocks[i].score * blocks[i].runs, to)
    path: list[Block] = []
    at, left = closing[1] if closing else 0, counted.copies
    while at >= 0:
        path.append(blocks[at])
        at, left = best[at, left][1], left - blocks[at].copies
    return path


def nvdisasm() -> str:
    """Returns the program. Raises FileNotFoundError."""
    found = shutil.which("nvdisasm")
    spec = find_spec("triton")
    if found is None and spec is not None and spec.origin is not None:
        found = shutil.which(str(Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm"))
    if found is None:
        raise FileNotFoundError("nvdisasm is not on PATH, and Triton, which has one, is not installed")
    return found


def machine_code(counted: Counted) -> list[str]:
    """Returns the lines of a kernel's machine code for 9.0."""
    path = CSRC / counted.source
    made = ROOT / "build" / "nvcc" / f"{path.stem}-{fingerprint(path)}.ptx"
    made.parent.mkdir(parents=True, exist_ok=True)
    if not made.is_file():
        part = made.with_suffix(".part")
        flags = [flag for flag in FLAGS if "ptxas" not in flag]
        subprocess.run(["nvcc", "-ptx", "-arch=compute_90", *flags, f"-I{CSRC}", path, "-o", part], check=True)
        part.rename(made)
    entries = re.findall(r"^\.(?:visible )?\.?entry (\w+)\(", made.read_text(), re.MULTILINE)
    (entry,) = [
        entry for entry, name in zip(entries, demangled(entries), strict=True) if spelled_alike(name) == counted.kernel
    ]
    cubin = made.with_suffix(".cubin")
    subprocess.run(["ptxas", "-arch=sm_90", "-O3", "-e", entry, made, "-o", cubin], check=True)
    text = subprocess.run([nvdisasm(), "-c", cubin], capture_output=True, text=True, check=True).stdout
    return text.partition(f".text.{entry}:")[2].splitlines()


def main() -> int:
    for counted in KERNELS:
        path = best_path(blocks_of(machine_code(counted)), counted)
        count = sum(len(block.names) * block.runs for block in path) / counted.positions
        print(f"{counted.title}: {count:.0f} instructions for {counted.each}")
        if "--paths" in sys.argv:
            for block in path:
                work = [name for name in block.names if WORK.match(name)]
                print(f"  {block.first} x{block.runs:g}: {len(block.names)}, {len(work)} work, {block.last}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
