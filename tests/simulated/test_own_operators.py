"""memcheck's own operators on a simulated A100: their code allocates what was predicted, to the byte."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memcheck._extension import _C, BUILD

pytestmark = pytest.mark.extension

FOLDER = Path(__file__).parent
STORED = json.loads((FOLDER.parent / "data" / "own_operators_a100.json").read_text(encoding="utf-8"))
# Of names of calls: by how much the simulated GPU's figures differ from those predicted. It is right each time.
# Autocast casts q first and v last (csrc/common/torch/registration.h), as on a CPU, and autograd widens their gradients
# in the other order. Predictions cast q last.
Q_FIRST = "predictions cast q last"
# Autocast casts q, kc and vc, and y has 16 bits, as measured on a CPU.
POOLED = "predictions cast nothing"
# Parts of the gradients of keys have no rows of their own for a last block that is shorter.
PARTS = "predictions are of kernels whose parts lay in the gradients"
LONG, WIDE = r"\(1, 8, 8, 4096, 4096, 64\)", r"\(1, 8, 2, 100, 20000, 128\)"
OF_PARTS = r"compressed_attention (?:causal=False|strict=\w+|window=20)"
DIFFERENCES = [
    (f"{OF_PARTS} {LONG} float32", [0, 0, -8192, 0], PARTS),
    (f"{OF_PARTS} {LONG} float64", [0, 0, -16384, 0], PARTS),
    (f"{OF_PARTS} {WIDE} float32", [0, 0, -4096, 0], PARTS),
    (f"{OF_PARTS} {WIDE} float64", [0, 0, -8192, 0], PARTS),
    ("softplus_attention .*under autocast", [0, 0, -11200, 0], Q_FIRST),
    ("linear_attention .*under autocast", [0, 0, -12800, 0], Q_FIRST),
    ("compressed_attention .*under autocast", [0, 0, 12800, 0], Q_FIRST),
    ("compressed_attention_pooled .*under autocast", [64000, 64000, -4482, 0], POOLED),
]
# Predictions refuse these. Without gradients 7,016,488 are q, k, v, cu_seqlens and y of both calls. The rest of the
# peak is means of 218 and 432 blocks, sums, the blocks' places, and a table of the sequences.
SEEN = {
    "compressed_attention packed in pieces factor=8": [7969168, 7956720, 13007600, 3508224],
    "compressed_attention packed in pieces factor=8 without gradients": [7696240, 7016488],
}
# Bytes of cu_seqlens, which the GPU does not hold where the caller has them on the CPU.
CU_SEQLENS = {"packed": 40, "packed, int32": 8, "packed, other queries": 64}


@pytest.fixture(scope="module")
def measured():
    """The figures of own_operators.py, of every call."""
    found = subprocess.run([sys.executable, FOLDER / "own_operators.py"], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout)


def test_every_call_takes_what_was_predicted(measured):
    expected = {name: adjusted(name, row) for name, row in STORED.items()} | SEEN
    assert {name: row for name, row in measured.items() if not name.endswith("from the CPU")} == expected


def adjusted(name, row):
    for pattern, differences, _ in DIFFERENCES:
        if re.fullmatch(pattern, name):
            return [figure + more for figure, more in zip(row, differences, strict=True)]
    return row


def test_sequences_on_the_cpu_are_copied_until_their_table_is_made(measured):
    names = [name for name in measured if name.endswith(", from the CPU")]
    assert len(names) == 48
    for name in names:
        there = name.removesuffix(", from the CPU")
        kind = next(kind for kind in reversed(CU_SEQLENS) if f" {kind} " in there)
        peak, alive, backward, gradients = (figure - CU_SEQLENS[kind] for figure in STORED[there])
        # A copy of the queries' and one of the keys' show where the call takes less scratch afterwards.
        copies = CU_SEQLENS[kind] * (1 if kind == "packed, other queries" else 2)
        forward, now_alive, of_backward, now_gradients = measured[name]
        assert (now_alive, now_gradients) == (alive, gradients + CU_SEQLENS[kind]), name
        assert 0 <= forward - peak <= copies, name
        assert 0 <= of_backward - backward <= copies, name


def test_scratch_is_that_of_the_plan(measured):
    sizes = {"B": 1, "H": 8, "Hkv": 8, "S": 4096, "T": 4096, "D": 64, "Dv": 64}
    plan = _C.linear_attention_plan(**sizes, causal=True, dtype="float32", threads=1, device="cuda")
    tensor = 8 * 4096 * 64 * 4
    peak, alive, backward, _ = measured["linear_attention causal=True (1, 8, 8, 4096, 4096, 64, 64) float32"]
    assert plan["forward_scratch"] > 0
    assert plan["backward_scratch"] > plan["forward_scratch"]
    assert (peak, alive) == (4 * tensor + plan["forward_scratch"], 4 * tensor)
    assert backward == 7 * tensor + 4 + plan["backward_scratch"]


OLD = """
import memcheck
memcheck.simulate("T4")
import torch
x = torch.rand(2, 5, 4, device="cuda")
calls = {
    "softplus": lambda: memcheck.softplus_attention(x, x.mT, x.mT),
    "padded": lambda: memcheck.softplus_attention(x, x.mT, x.mT, lengths=torch.tensor([5, 3])),
    "linear": lambda: memcheck.linear_attention(x[None], x[None], x[None]),
    "compressed": lambda: memcheck.compressed_attention(x[None], x[None], x[None], factor=2),
    "combinator": lambda: memcheck.combinator(x, x.new_empty(2, 4, 4)),
}
for call in calls.values():
    try:
        call()
    except RuntimeError as error:
        print(error)
print(*memcheck.linear_r(x, x[0].mT).shape)  # torch's own products
"""


def test_an_older_gpu_is_refused():
    found = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, timeout=300)
    refusal = "memcheck's CUDA kernels need a GPU of compute capability 8.0 or later, got 7.5"
    assert found.stdout.splitlines() == [*[refusal] * 5, "2 5 5"], found.stderr[-3000:]


UNKNOWN = """
import memcheck
memcheck.simulate("A100-40GB")
import torch
x = torch.rand(1, 2, 64, 8).cuda().requires_grad_()
packed = {"cu_seqlens": torch.tensor([0, 30, 64])}
results = [memcheck.compressed_attention(x, x, x, factor=4, **packed), memcheck.linear_attention(x, x, x)]
results += [memcheck.softplus_attention(x[0], x[0].mT, x[0].mT), memcheck.combinator(x, torch.ones(2, 8, 8).cuda())]
results += torch.autograd.grad(results[0].sum(), x)
results.append(memcheck.compressed_attention(x, x, x, factor=4, return_state=True, **packed)[1][0].kc)
print(*[result.sum().item() for result in results])
"""


def test_what_kernels_write_is_unknown():
    """Not the zeros that new memory has, and padding."""
    found = subprocess.run([sys.executable, "-c", UNKNOWN], capture_output=True, text=True, timeout=300)
    assert found.stdout.split() == ["1.0"] * 6, found.stderr[-3000:]


@pytest.mark.skipif(bool(BUILD and BUILD.CUDA_VERSION), reason="this build has CUDA kernels")
def test_a_real_gpu_has_no_kernels_that_do_nothing():
    for name in ("softplus_attention", "linear_attention", "compressed_attention", "combinator"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"memcheck::{name}", "CUDA")
