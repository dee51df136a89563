"""memcheck's own operators. The rules follow the plans of their C++ glue, in its order of allocation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from memcheck.core.errors import UnsupportedError
from memcheck.core.tensors import dtype_name
from memcheck.simulated.facts.products import ONEDNN, fits_blas, products_are_plain
from memcheck.simulated.scratch import Facts, OperatorCall, Rule, Scratch, Target, Unknown, add

# The oldest compute capability that memcheck's CUDA kernels support.
LEAST_ARCHITECTURE = (8, 0)


def check_gpu(target: Target) -> None:
    """Raises UnsupportedError if memcheck's CUDA kernels do not run on the GPU."""
    if target.architecture is not None and target.architecture < LEAST_ARCHITECTURE:
        needed, got = (".".join(map(str, version)) for version in (LEAST_ARCHITECTURE, target.architecture))
        raise UnsupportedError(f"memcheck's CUDA kernels need a GPU of compute capability {needed} or later, got {got}")


def plan_of(call: OperatorCall, operator: str, x: Tensor, **sizes: Any) -> dict[str, int]:
    """The bytes of each part of the scratch, by the operator's C++ plan. x: has the operator's dtype."""
    from memcheck._extension import _C

    check_gpu(call.target)
    plan: dict[str, int] = getattr(_C, f"{operator}_plan")(**sizes, dtype=dtype_name(x), device=call.target.kind)
    return plan


def linear_plan(call: OperatorCall, Dv: int, **how: bool) -> dict[str, int]:
    (B, H, S, D), (_, Hkv, T, _) = call.q.shape, call.k.shape
    sizes = {"B": B, "H": H, "Hkv": Hkv, "S": S, "T": T, "D": D, "Dv": Dv}
    sizes |= {"threads": call.target.threads, **how, **(sequences_of(call, S, T) or {})}
    return plan_of(call, "linear_attention", call.q, **sizes, causal=call.arguments.get("causal", False))


def compressed_plan(call: OperatorCall, Hkv: int, T: int, blocks: int | None = None) -> dict[str, int]:
    """blocks: of keys and values that came pooled."""
    B, H, S, D = call.q.shape
    sizes: dict[str, Any] = {
        "blocks": blocks,
        "B": B,
        "H": H,
        "Hkv": Hkv,
        "S": S,
        "T": T,
        "D": D,
        "factor": call.factor,
    }
    sizes |= {"threads": call.target.threads, **(sequences_of(call, S, T) or {})}
    if call.arguments.get("window") is not None:
        near = call.k.shape[2] + call.arguments.get("positions", 0)
        sizes |= {"window": min(call.window, max(T, 1)), "first": T - near}
    return plan_of(call, "compressed_attention", call.q, **sizes, causal=call.arguments.get("causal", True))


SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "lengths")
SEQUENCE_BYTES = 40  # Of one sequence in the table that kernels on a GPU read.
UNKNOWN_LENGTHS = Unknown("the scratch of sequences whose lengths are not known")


def sequences_of(call: OperatorCall, S: int, T: int) -> dict[str, Any] | None:
    """The sequences of a packed or padded batch as plans take them, empty for others. None: lengths are not known."""
    given = [call.arguments.get(name) for name in SEQUENCES]
    packed = given[0] is not None
    first = next((x for x in given if x is not None), None)
    if call.target.kind == "cuda" and first is not None:
        # Plans for a GPU depend on the number of sequences alone. cu_seqlens has one number more.
        return {"sequences": [(0, 0)] * (first.shape[0] - packed), "packed": packed}
    contents = [None if x is None else call.contents(x) for x in given]
    if any(x is not None and values is None for x, values in zip(given, contents, strict=True)):
        return None
    starts, key_starts, lengths = (None if values is None else values.tolist() for values in contents)
    if starts is not None and key_starts is not None:
        pairs = zip(pairwise(starts), pairwise(key_starts), strict=True)
        return {
            "sequences": [(end - begin, key_end - first) for (begin, end), (first, key_end) in pairs],
            "packed": True,
        }
    if lengths is None:
        return {}

    def queries(keys: int) -> int:
        if not call.arguments.get("causal", True) and S != T:
            return S
        return min(S, keys) if call.arguments.get("left_padded") else max(0, keys - (T - S))

    return {"sequences": [(queries(keys), keys) for keys in lengths]}


def sequence_table(call: OperatorCall, S: int, T: int) -> Iterator[Scratch | Unknown]:
    """The scratch of packed and padded batches that is not in the plan."""
    sequences = sequences_of(call, S, T)
    if sequences is None:
        yield UNKNOWN_LENGTHS
    elif sequences and call.target.kind == "cuda":
        yield Scratch("table of sequences", SEQUENCE_BYTES * max(1, len(sequences["sequences"])))


def softplus(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    (B, S, R), T = call.q.shape, call.k.shape[2]
    yield from sequence_table(call, S, T)
    if (sequences := sequences_of(call, S, T)) is None:
        return
    sizes = {"B": B, "S": S, "T": T, "R": R, "threads": call.target.threads, "causal": call.causal}
    plan = plan_of(call, "softplus_attention", call.q, **sizes, **sequences)
    if call.name.endswith("_backward"):
        yield Scratch("sums and tiles", plan["backward_scratch"])
    else:
        yield Scratch("sums", plan["forward_sums" if call.keep_carries else "forward_scratch"])


def no_scratch(call: OperatorCall) -> Iterator[Scratch]:
    check_gpu(call.target)
    yield from ()


def linear(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    flags = {"decayed": call.decay is not None, "normalize": call.normalize}
    continued = call.initial_m is not None or call.return_state
    plan = linear_plan(call, call.v.shape[3], continued=continued, **flags)
    yield from sequence_table(call, call.q.shape[2], call.k.shape[2])
    yield Scratch("states", plan["forward_states"])
    yield Scratch("tiles", plan["forward_scratch"] - plan["forward_states"])


def linear_step(call: OperatorCall) -> Iterator[Scratch]:
    plan = linear_plan(call, call.v.shape[3])
    yield Scratch("tiles", plan["forward_scratch"] - plan["forward_states"])


def linear_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    (B, Hkv, T, _), acc = call.k.shape, torch.promote_types(call.q.dtype, torch.float32).itemsize
    from_state = call.grad_m is not None or call.grad_z is not None
    missing = [call.q.element_size()] if call.grad_y is None else []
    if from_state:
        missing += [acc] * ((call.grad_m is None) + (call.grad_z is None and call.normalize))
    flags = {"decayed": call.decay is not None, "decays_learn": call.output_mask[3], "normalize": call.normalize}
    continued = call.initial_m is not None or from_state
    plan = linear_plan(call, (call.v if call.grad_y is None else call.grad_y).shape[3], continued=continued, **flags)
    yield from sequence_table(call, call.q.shape[2], T)
    yield Scratch("zeros in place of gradients", sum(missing))
    if call.output_mask[3] and call.decay.dim() == 1:
        yield Scratch("gradients of the decay of each position", B * Hkv * T * acc)
    yield Scratch("sums of rows", plan["backward_rows"])
    yield Scratch("states", plan["backward_states"])
    yield Scratch("tiles", plan["backward_scratch"] - plan["backward_rows"] - plan["backward_states"])


def compressed(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    plan = compressed_plan(call, *call.k.shape[1:3])
    yield from laid_out_sink(call)
    yield from sequence_table(call, call.q.shape[2], call.k.shape[2])
    if not call.keep:
        yield Scratch("compressed k", plan["compressed"] // 2)
        yield Scratch("compressed v", plan["compressed"] // 2)
    yield Scratch("scratch", plan["forward_scratch"])


def compressed_pooled(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    plan = compressed_plan(call, call.kc.shape[1], call.kv_len, call.kc.shape[2])
    yield from laid_out_sink(call)
    yield from sequence_table(call, call.q.shape[2], call.kv_len)
    yield Scratch("scratch", plan["pooled_forward_scratch"])


def compressed_extend(call: OperatorCall) -> Iterator[Scratch]:
    """Each sequence has a row of results for each block, complete or open."""
    backward = call.name.endswith("backward")
    like = call.like if backward else call.k
    B, Hkv, T, D = call.sizes if backward else call.k.shape
    packed_or_padded = len(call.arguments.get("places", ())) > 0
    counts = call.counts if packed_or_padded else [T] * B
    positions = call.positions if packed_or_padded else list(call.positions) * B
    rows = sum((opened + count) // call.factor + 1 for opened, count in zip(positions, counts, strict=True))
    sizes = {"B": 1, "H": Hkv, "Hkv": Hkv, "S": 0, "T": rows * call.factor, "D": D, "factor": call.factor}
    plan = plan_of(call, "compressed_attention", like, **sizes, threads=call.target.threads, causal=False)
    yield Scratch("scratch", plan["extension_scratch"])


def compressed_step(call: OperatorCall) -> Iterator[Scratch]:
    completes = call.name.endswith("last_step")
    blocks = call.blocks + 1 if completes else call.kc.shape[2]
    positions = blocks * call.factor + (0 if completes else call.positions + 1)
    yield Scratch("scratch", compressed_plan(call, call.k.shape[1], positions, blocks)["pooled_forward_scratch"])


def compressed_window_step(call: OperatorCall) -> Iterator[Scratch]:
    positions = call.blocks * call.factor + call.positions + 1
    yield Scratch("scratch", compressed_plan(call, call.k.shape[1], positions, call.blocks)["pooled_forward_scratch"])


def compressed_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    plan = compressed_plan(call, call.kc.shape[1], call.kv_len, call.kc.shape[2])
    yield from laid_out_sink(call)
    yield from sequence_table(call, call.q.shape[2], call.kv_len)
    of_window = call.output_mask[4:5] if call.k is not None else []
    yield Scratch("delta", plan["delta"] if any([call.output_mask[1], call.output_mask[3], *of_window]) else 0)
    yield Scratch("scratch", plan["backward_scratch"])


def laid_out_sink(call: OperatorCall) -> Iterator[Scratch]:
    if call.sink is not None and not call.sink.is_contiguous():
        yield Scratch("sink, laid out", call.sink.numel() * call.sink.element_size())


def combinator(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    plan = combinator_plan(call, call.x)
    keeps = call.keep_preactivations
    rows = plan["kept_rows" if keeps else "rows"]
    yield Scratch("rows of x", copy_of_rows(call.x))
    yield Scratch("weight in float32", plan["weight"])
    yield Scratch("rows in float32", plan["wide"] if plan["weight"] else 0)
    yield Scratch("pre-activations of a chunk", 0 if keeps else plan["chunk"])
    if not plan["weight"]:
        yield Scratch("weight", copy_of_rows(call.weight))
        yield Scratch("operands laid out for BLAS", laid_out_rows(call.x, rows) + laid_out_rows(call.weight))
    yield from unplanned_products(call, call.x)


def combinator_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    wants_x, wants_weight = call.output_mask
    plan = combinator_plan(call, call.grad_y)
    recomputes = call.preactivations is None
    yield Scratch("rows of the gradient", copy_of_rows(call.grad_y))
    of_x = copy_of_rows(call.x) if wants_weight or recomputes else 0
    yield Scratch("rows of x, and then of its gradient", max(of_x, copy_of_rows(call.outputs[0]) if wants_x else 0))
    yield Scratch("pre-activations of a chunk", plan["chunk"])
    if wants_weight or plan["weight"]:
        yield Scratch("rows in float32", plan["wide"])
    if wants_weight:
        of_sum = plan["sums"] or copy_of_rows(call.outputs[-1])
        yield Scratch("gradient of the weight, summed", of_sum)
    if wants_x or recomputes:
        yield Scratch("weight in float32", plan["weight"])
    if not plan["weight"]:
        of_weight = laid_out_rows(call.weight) if wants_x or recomputes else 0
        of_chunk = laid_out_rows(call.x, plan["rows"]) if recomputes or (wants_weight and not plan["wide"]) else 0
        yield Scratch("weight", copy_of_rows(call.weight) if wants_x or recomputes else 0)
        yield Scratch("operands laid out for BLAS", of_weight + of_chunk if recomputes else max(of_weight, of_chunk))
    yield from unplanned_products(call, call.grad_y)


def combinator_plan(call: OperatorCall, x: Tensor) -> dict[str, int]:
    return plan_of(call, "combinator", x, N=x.numel() // x.shape[-1], E=x.shape[-1])


def merges(x: Tensor) -> bool:
    """Whether (...,E) can be viewed as a matrix (N,E)."""
    try:
        x.view(-1, x.shape[-1])
    except RuntimeError:
        return x.numel() == 0
    return True


def copy_of_rows(x: Tensor) -> int:
    """The bytes of the copy of (...,E) whose rows are those of a matrix."""
    return 0 if merges(x) else x.numel() * x.element_size()


def laid_out_rows(x: Tensor, count: int | None = None) -> int:
    """The bytes of the copy that GEMM needs of so many rows of (...,E), by default all, where they are a matrix."""
    if x.numel() == 0 or not merges(x) or fits_blas(rows := x.view(-1, x.shape[-1])):
        return 0
    return (len(rows) if count is None else count) * x.shape[-1] * x.element_size()


def unplanned_products(call: OperatorCall, x: Tensor) -> Iterator[Unknown]:
    from memcheck._extension import _C

    dtype, rows = dtype_name(x), x.numel() // max(1, x.shape[-1])
    in_float = "combinator" in call.name and not _C.cpu_multiplies(dtype=dtype, rows=rows)
    if call.target.kind == "cpu" and not in_float and not products_are_plain(dtype):
        yield Unknown(ONEDNN)


def projection(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """An operand that GEMM cannot read in place is copied."""
    (y,) = call.outputs
    y = y.mT if call.name.endswith("linear_l") else y
    x = Scratch("x laid out for BLAS", laid_out(call.x, y, in_batch=call.target.kind == "cuda"))
    w = Scratch("w laid out for BLAS", laid_out_rows(call.w))
    yield from (x, w) if call.name.endswith("linear_l") else (w, x)  # y^T = w^T x^T, where y is in rows.
    yield from unplanned_products(call, call.x)


def projection_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Products over all rows if these merge, else one for each batch entry.

    Several products of 16-bit matrices are summed in float32, on the CPU from rows in float32.
    """
    grad: Tensor = call.grad_y.mT if "linear_l" in call.name else call.grad_y  # (B,S,R)
    yield from unplanned_products(call, grad)
    wants_x, wants_w = call.output_mask[:2]
    of_x = laid_out(grad, call.outputs[0], in_batch=call.target.kind == "cuda") if wants_x else 0
    of_x += laid_out_rows(call.w) if wants_x else 0
    of_w = sums = of_rows = 0
    if wants_w:
        x, item, whole = call.x, grad.element_size(), merges(grad) and merges(call.x)
        if not whole and item == 2:
            sums = call.outputs[-1].numel() * 4
        if sums and call.target.kind == "cpu":
            columns = 4 * (x.shape[2] + grad.shape[2])
            of_rows = min(max(max(grad.numel() * item // 16, 2**20) // columns, 1), grad.shape[1]) * columns
        else:
            of_w = laid_out(x, grad) + laid_out(grad, x)
    yield Scratch("operands laid out for BLAS", max(of_x - sums - of_rows, of_w, 0))
    yield Scratch("gradient of the weight in float32", sums)
    yield Scratch("rows in float32", of_rows)


def laid_out(operand: Tensor, beside: Tensor, in_batch: bool = False) -> int:
    """The bytes of the copy that GEMM needs of an operand (B,S,E), or of one of its batch entries, unless its rows and
    those of the other tensor of the product merge, or all entries are in one call."""
    if merges(operand) and merges(beside):
        return laid_out_rows(operand)
    if operand.numel() == 0 or fits_blas(operand):
        return 0
    return operand.numel() * operand.element_size() // (1 if in_batch else len(operand))


def add_pair(name: str, example: str, forward: Rule, backward: Rule, **facts: Any) -> None:
    """Adds an operator of memcheck and its backward. The rules hold on every device."""
    add(f"memcheck::{name}", example, everywhere=forward, **facts)
    add(f"memcheck::{name}_backward", example, everywhere=backward, **facts)


OURS: Facts = {"source": "csrc/softplus_attention"}
PACKED = "{'cu_seqlens': torch.tensor([0, 1, 1, q.shape[-2]])}"
EXAMPLE = "[memcheck.softplus_attention(x, x.mT, x.mT, **sequences) for x, sequences in "
EXAMPLE += f"((batch, {{}}), (batch[:1], {PACKED}))]"
add_pair("softplus_attention", EXAMPLE, softplus, softplus, **OURS)
EXAMPLE = "memcheck.softplus_attention_step(token[0], token[0].mT, token[0].mT)"
add("memcheck::softplus_attention_step", EXAMPLE, everywhere=no_scratch, **OURS)
OURS = {"source": "csrc/linear_attention"}
HOW = f"({{'causal': True}}, {{}}, {PACKED})"
EXAMPLE = f"[memcheck.linear_attention(q, q, q, **how) for how in {HOW}]"
add_pair("linear_attention", EXAMPLE, linear, linear_backward, **OURS)
EXAMPLE = "memcheck.linear_attention_step(token, token, token)"
add("memcheck::linear_attention_step", EXAMPLE, everywhere=linear_step, **OURS)
OURS = {"source": "csrc/compressed_attention"}
EXAMPLE = f"[memcheck.compressed_attention(q, q, q, factor=4, **sequences) for sequences in ({{}}, {PACKED})]"
add_pair("compressed_attention", EXAMPLE, compressed, compressed_backward, **OURS)
EXAMPLE = "memcheck.compressed_attention_pooled(q, q[..., ::8, :], q[..., ::8, :], factor=8, kv_len=q.shape[-2])"
add_pair("compressed_attention_pooled", EXAMPLE, compressed_pooled, compressed_backward, **OURS)
EXAMPLE = "torch.ops.memcheck.compressed_attention_extend(q, q, sums, sums, positions=[1], factor=4)"
add_pair("compressed_attention_extend", EXAMPLE, compressed_extend, compressed_extend, **OURS)
STATE = "q.detach(), q.detach(), sums, sums"
EXAMPLE = f"torch.ops.memcheck.compressed_attention_step(token, token, token, {STATE}, 1, factor=4)"
add("memcheck::compressed_attention_step", EXAMPLE, everywhere=compressed_step, **OURS)
EXAMPLE = f"torch.ops.memcheck.compressed_attention_last_step(token, token, token, {STATE}, 0, factor=4)"
add("memcheck::compressed_attention_last_step", EXAMPLE, everywhere=compressed_step, **OURS)
STATE = "*[q.detach()] * 4, 0, 0, 1"
EXAMPLE = f"torch.ops.memcheck.compressed_attention_window_step(token, token, token, {STATE}, factor=4, window=8)"
add("memcheck::compressed_attention_window_step", EXAMPLE, everywhere=compressed_window_step, **OURS)
OURS = {"uses_cublas": True, "source": "csrc/combinator csrc/projection"}
EXAMPLE = "[memcheck.combinator(x, weight, low_memory=low) for low in (True, False) for weight in weights]"
add_pair("combinator", EXAMPLE, combinator, combinator_backward, **OURS)
for side in "lr":
    add_pair(f"linear_{side}", f"memcheck.linear_{side}(batch, square[:, :5])", projection, projection_backward, **OURS)
