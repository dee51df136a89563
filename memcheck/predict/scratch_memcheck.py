"""Rules for the scratch of memcheck's operators, from the plans of their C++ glue, in its order of allocation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from memcheck.core.errors import UnsupportedError
from memcheck.core.tensors import dtype_name
from memcheck.predict.scratch import (
    PRODUCTS,
    OperatorCall,
    Scratch,
    Target,
    Unknown,
    fits_blas,
    products_are_plain,
    rule,
)

PRODUCTS |= {"memcheck::combinator", "memcheck::combinator_backward"}
PRODUCTS |= {f"memcheck::linear_{side}{phase}" for side in "lr" for phase in ("", "_backward")}


# The oldest compute capability that memcheck's CUDA kernels support.
LEAST_ARCHITECTURE = (8, 0)


def check_gpu(target: Target) -> None:
    """Raises UnsupportedError if memcheck's CUDA kernels do not run on the GPU."""
    if target.architecture is not None and target.architecture < LEAST_ARCHITECTURE:
        needed, got = (".".join(map(str, version)) for version in (LEAST_ARCHITECTURE, target.architecture))
        raise UnsupportedError(f"memcheck's CUDA kernels need a GPU of compute capability {needed} or later, got {got}")


def plan_of(call: OperatorCall, operator: str, **sizes: Any) -> dict[str, int]:
    """The bytes of each part of the scratch, by the operator's C++ plan."""
    from memcheck._extension import _C

    check_gpu(call.target)
    plan: dict[str, int] = getattr(_C, f"{operator}_plan")(**sizes, device=call.target.kind)
    return plan


@rule("any", "memcheck::softplus_attention")
def softplus(call: OperatorCall) -> Iterator[Scratch]:
    plan = softplus_plan(call)
    yield Scratch("carries", 0 if call.keep_carries else plan["forward_scratch"] - plan["forward_sums"])
    yield Scratch("sums", plan["forward_sums"])


@rule("any", "memcheck::softplus_attention_backward")
def softplus_backward(call: OperatorCall) -> Iterator[Scratch]:
    plan = softplus_plan(call)
    yield Scratch("sums", plan["backward_sums"])
    yield Scratch("scratch", plan["backward_scratch"] - plan["backward_sums"])


def softplus_plan(call: OperatorCall) -> dict[str, int]:
    (B, S, R), T = call.q.shape, call.k.shape[2]
    sizes = {"B": B, "S": S, "T": T, "R": R, "threads": call.target.threads}
    return plan_of(call, "softplus_attention", **sizes, causal=call.causal, dtype=dtype_name(call.q))


@rule("any", "memcheck::softplus_attention_step")
def nothing(call: OperatorCall) -> Iterator[Scratch]:
    """A step has no scratch."""
    check_gpu(call.target)
    yield from ()


@rule("any", "memcheck::linear_attention", "memcheck::linear_attention_step")
def linear(call: OperatorCall) -> Iterator[Scratch]:
    plan = linear_plan(call, call.v.shape[3])
    if not call.name.endswith("_step"):
        yield Scratch("states", plan["forward_states"])
    yield Scratch("tiles", plan["forward_scratch"] - plan["forward_states"])


@rule("any", "memcheck::linear_attention_backward")
def linear_backward(call: OperatorCall) -> Iterator[Scratch]:
    plan = linear_plan(call, call.grad_y.shape[3])
    yield Scratch("sums of rows", plan["backward_rows"])
    yield Scratch("states", plan["backward_states"])
    yield Scratch("tiles", plan["backward_scratch"] - plan["backward_rows"] - plan["backward_states"])


def linear_plan(call: OperatorCall, Dv: int) -> dict[str, int]:
    (B, H, S, D), (_, Hkv, T, _) = call.q.shape, call.k.shape
    sizes = {"B": B, "H": H, "Hkv": Hkv, "S": S, "T": T, "D": D, "Dv": Dv, "threads": call.target.threads}
    return plan_of(
        call, "linear_attention", **sizes, causal=call.arguments.get("causal", False), dtype=dtype_name(call.q)
    )


@rule("any", "memcheck::compressed_attention")
def compressed(call: OperatorCall) -> Iterator[Scratch]:
    plan = compressed_plan(call, call.k.shape[1], call.k.shape[2])
    if not call.keep:
        yield Scratch("compressed k", plan["compressed"] // 2)
        yield Scratch("compressed v", plan["compressed"] // 2)
    yield Scratch("scratch", plan["forward_scratch"])


@rule("any", "memcheck::compressed_attention_pooled")
def compressed_pooled(call: OperatorCall) -> Iterator[Scratch]:
    plan = compressed_plan(call, call.kc.shape[1], call.kv_len)
    yield Scratch("scratch", plan["pooled_forward_scratch"])


@rule("any", "memcheck::compressed_attention_step")
def compressed_step(call: OperatorCall) -> Iterator[Scratch]:
    blocks, opened = call.kc.shape[2], call.positions + 1
    plan = compressed_plan(call, call.k.shape[1], blocks * call.factor + opened)
    yield Scratch("scratch", plan["pooled_forward_scratch"])


@rule("any", "memcheck::compressed_attention_backward", "memcheck::compressed_attention_pooled_backward")
def compressed_backward(call: OperatorCall) -> Iterator[Scratch]:
    plan = compressed_plan(call, call.kc.shape[1], call.kv_len)
    if call.grad_lse is not None and not call.grad_lse.is_contiguous():
        yield Scratch("gradient of lse, laid out", call.grad_lse.numel() * call.grad_lse.element_size())
    yield Scratch("delta", plan["delta"] if call.output_mask[1] or call.output_mask[3] else 0)
    yield Scratch("scratch", plan["backward_scratch"])


def compressed_plan(call: OperatorCall, Hkv: int, T: int) -> dict[str, int]:
    B, H, S, D = call.q.shape
    sizes = {"B": B, "H": H, "Hkv": Hkv, "S": S, "T": T, "D": D, "factor": call.factor}
    sizes["threads"] = call.target.threads
    causal = call.arguments.get("causal", True)
    return plan_of(call, "compressed_attention", **sizes, causal=causal, dtype=dtype_name(call.q))


@rule("any", "memcheck::combinator")
def combinator(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    plan = combinator_plan(call, call.x)
    yield Scratch("rows laid out for BLAS", plan["copy"])
    yield Scratch("weight in float32", plan["weight"])
    yield Scratch("rows in float32", plan["wide"] if plan["weight"] else 0)
    yield Scratch("pre-activations of a chunk", 0 if call.keep_preactivations else plan["chunk"])
    yield from unplanned_products(call, call.x)


@rule("any", "memcheck::combinator_backward")
def combinator_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    plan = combinator_plan(call, call.grad_y if call.x is None else call.x)
    if call.output_mask[0] or call.preactivations is None:
        yield Scratch("weight in float32", plan["weight"])
    yield Scratch("rows laid out for BLAS", plan["copy"])
    yield Scratch("pre-activations of a chunk", plan["chunk"])
    if call.output_mask[1] or plan["weight"]:
        yield Scratch("rows in float32", plan["wide"])
    if call.output_mask[1]:
        yield Scratch("gradient of the weight in float32", plan["sums"])
    yield from unplanned_products(call, call.grad_y)


def combinator_plan(call: OperatorCall, x: Tensor) -> dict[str, int]:
    sizes = {"N": x.numel() // x.shape[-1], "E": x.shape[-1]}
    return plan_of(call, "combinator", **sizes, dtype=dtype_name(x), copies=not x.is_contiguous())


def in_float(call: OperatorCall, x: Tensor) -> bool:
    """Whether products are formed in float32, because the CPU has no instructions for those of 16-bit matrices."""
    from memcheck._extension import _C

    rows = x.numel() // max(1, x.shape[-1])
    return call.target.kind == "cpu" and not _C.cpu_multiplies(dtype=dtype_name(x), rows=rows)


def unplanned_products(call: OperatorCall, x: Tensor) -> Iterator[Unknown]:
    if call.target.kind == "cpu" and not in_float(call, x) and not products_are_plain(dtype_name(x)):
        yield Unknown("what oneDNN takes in products of 16-bit matrices")


@rule("any", "memcheck::linear_r", "memcheck::linear_l")
def projection(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """One product over all rows if those of x and of y merge, else one for each batch entry.

    An operand that GEMM cannot read in place is copied.
    """
    (y,) = call.outputs
    rows_of_y = y.mT if call.name.endswith("linear_l") else y
    if in_float(call, call.x):
        yield Scratch("w in float32", call.w.numel() * 4)
        yield wide_rows(rows_of_y, call.x, [rows_of_y, call.x])
        return
    whole = merges(call.x) and merges(rows_of_y)
    x = Scratch("x laid out for BLAS", laid_out(call.x, 1 if whole else len(call.x)))
    w = Scratch("w laid out for BLAS", laid_out(call.w))
    yield from (x, w) if call.name.endswith("linear_l") else (w, x)  # y^T = w^T x^T, where y is in rows.
    yield from unplanned_products(call, call.x)


@rule("any", "memcheck::linear_r_backward", "memcheck::linear_l_backward")
def projection_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Products over all rows, or over pieces if the gradient must be copied.

    Over pieces, the gradient of a 16-bit weight is summed in float32; on the CPU its factors are converted, too. If the
    CPU has no instructions for 16-bit products, all are formed in float32.
    """
    grad: Tensor = call.grad_y.mT if "linear_l" in call.name else call.grad_y  # (B,S,R)
    yield from unplanned_products(call, grad)
    wants_x, wants_w = call.output_mask[:2]
    if in_float(call, grad):
        x = call.x if wants_w else call.outputs[0]
        yield Scratch("w in float32", call.w.numel() * 4 if wants_x else 0)
        yield Scratch("gradient of the weight in float32", call.outputs[-1].numel() * 4 if wants_w else 0)
        if wants_x or wants_w:
            yield wide_rows(grad, x, [grad, *[call.x] * wants_w, *[call.outputs[0]] * wants_x])
        return
    merged = merges(grad) and fits_blas(grad)
    x_whole, w_whole = (
        merged and wanted and merges(of) for wanted, of in ((wants_x, call.outputs[0]), (wants_w, call.x))
    )
    (B, S, R), copies = grad.shape, not fits_blas(grad)
    rows = copied_rows(B, S, R, grad.element_size(), R * grad.element_size()) if copies else S
    pieces = 1 if w_whole else B * -(-S // rows)
    if copies:
        yield Scratch("rows of the gradient laid out for BLAS", rows * R * grad.element_size())
    sums = wants_w and grad.element_size() < 4 and pieces > 1
    widens = sums and call.target.kind == "cpu"
    of_sums = call.outputs[-1].numel() * 4 if sums else 0
    columns = R + call.x.shape[2] if widens else 0
    of_rows = copied_rows(B, S, R, grad.element_size(), columns * 4) * columns * 4 if widens else 0
    parts = laid_out(call.x) * (B * S if w_whole else rows) // (B * S) if wants_w and not widens else 0
    of_w = laid_out(call.w) if wants_x else 0
    if x_whole and not w_whole:  # the gradient of x is finished before the others are allocated
        of_w = max(0, of_w - of_sums - of_rows)
    yield Scratch("operand laid out for BLAS", max(parts, of_w))
    yield Scratch("gradient of the weight in float32", of_sums)
    yield Scratch("rows in float32", of_rows)


def wide_rows(y: Tensor, x: Tensor, merged: list[Tensor]) -> Scratch:
    """Rows of x (B,S,E) and y (B,S,R) in float32, over all batch entries if those of each of the tensors merge."""
    (B, S, R), columns = y.shape, y.shape[2] + x.shape[2]
    B, S = (1, B * S) if all(map(merges, merged)) else (B, S)
    return Scratch("rows in float32", copied_rows(B, S, R, y.element_size(), columns * 4) * columns * 4)


def laid_out(operand: Tensor, parts: int = 1) -> int:
    """The bytes of the copy that GEMM needs of it or of one of its parts."""
    return 0 if operand.numel() == 0 or fits_blas(operand) else operand.nbytes // parts


def merges(x: Tensor) -> bool:
    """Whether (B,S,R) can be viewed as (B S,R) without a copy."""
    return x.numel() > 0 and (1 in x.shape[:2] or x.stride(0) == x.shape[1] * x.stride(1))


def copied_rows(B: int, S: int, R: int, element_bytes: int, row_bytes: int) -> int:
    """The number of copied rows, as in csrc/projection/projection.h."""
    size = max(B * S * R * element_bytes // 16, 2**20)
    return min(max(size // row_bytes, 1), S)
