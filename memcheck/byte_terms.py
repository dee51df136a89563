"""Bytes that follow from the shapes alone: for each contender what is alive when most is, by name.

Exact on the CPU, where nothing else is said, and tested to be; None for what is not known.
"""

from __future__ import annotations

import platform

import torch

from memcheck.cases import DTYPES, Case, Terms
from memcheck.ledger import Ledger


def tensor_bytes(case: Case) -> tuple[int, int, int]:
    """Of q or y, of k or v, and of an (S,T) matrix for each batch and head."""
    assert case.kv_len is not None
    item = DTYPES[case.dtype].itemsize
    pairs = case.bsz * (case.heads or 1) * case.query_len * case.kv_len
    return case.bsz * case.query_len * case.dim * item, case.bsz * case.kv_len * case.dim * item, pairs * item


def flash_terms(case: Case) -> Terms | None:
    """SDPA's flash backend on the CPU in fp32 and fp64, but for its backward: there threads allocate as they go."""
    exact = case.dtype in ("float32", "float64") and case.device == "cpu" and case.heads is not None
    if not exact or case.kv_len is None or (case.causal and case.query_len != case.kv_len):
        return None
    queries, keys, _ = tensor_bytes(case)
    assert case.heads is not None
    item, rows = DTYPES[case.dtype].itemsize, case.bsz * case.heads * case.query_len
    tile_rows = min(case.query_len, 256 if case.query_len >= 768 else 64 if case.query_len >= 192 else 32)
    # Scores, maxima and sums, and a part of y.
    tile = tile_rows * (min(case.kv_len, 512) + 2 + case.dim // case.heads)
    kept = {"log-sum-exp": rows * item}
    forward = {"q": queries, "k": keys, "v": keys, "y": queries, **kept, "tiles": torch.get_num_threads() * tile * item}
    return {"forward_peak_bytes": forward, **({"saved_bytes": kept} if case.mode == "train" else {})}


def naive_terms(case: Case) -> Terms | None:
    """On the CPU: S*T scores live on beside their softmax until the product is done. What is saved, in every dtype;
    peaks, where the product of matrices takes nothing for itself."""
    if case.device != "cpu" or case.kv_len is None:
        return None
    queries, keys, matrix = tensor_bytes(case)
    item, training = DTYPES[case.dtype].itemsize, case.mode == "train"
    held = {"q": queries, "k": keys, "v": keys, "y": queries}
    kept = {"probabilities": matrix}
    if case.causal:
        kept["mask, a byte each"] = case.query_len * case.kv_len
    if training:
        kept["sqrt(D), a scalar"] = 8
    terms = {"saved_bytes": kept} if training else {}
    if not products_are_plain(case):
        return terms or None
    terms["forward_peak_bytes"] = {**held, **kept, "scores": matrix}
    if training:
        gradients = naive_backward_terms(kept, queries, keys, matrix, copies_dk=case.kv_len > 1)
        terms["backward_peak_bytes"] = {**held, "grad_y, expanded": item, **gradients}
    return terms


def products_are_plain(case: Case) -> bool:
    """Not so in 16 bits where oneDNN has instructions for them, and takes scratch of its own."""
    if case.dtype == "float16" and platform.machine() == "x86_64" and torch.backends.mkldnn.is_available():
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return case.dtype in ("float32", "float64")


def naive_backward_terms(
    kept: dict[str, int], queries: int, keys: int, matrix: int, *, copies_dk: bool
) -> dict[str, int]:
    """The fullest of three moments: the softmax's derivative, the products for dq and dk, the copy into k's layout,
    which a single key has from the start."""
    moments = (
        {**kept, "gradient of probabilities": matrix, "gradient of scores": matrix, "dv": keys},
        {"gradient of scores": matrix, "dq": queries, "dk": keys, "dv": keys},
        {"dq": queries, "dk, transposed": keys, "dk, laid out like k": keys if copies_dk else 0, "dv": keys},
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def softplus_terms(case: Case) -> Terms | None:
    """From the plan of the device's kernels themselves. Exact on the CPU in every dtype."""
    if case.device not in ("cpu", "cuda") or case.core_dim is None or case.kv_len is None:
        return None
    from memcheck._extension import _C

    B, S, T, R = case.bsz, case.query_len, case.kv_len, case.core_dim
    options = {"dtype": case.dtype, "threads": torch.get_num_threads(), "device": case.device}
    plan = _C.softplus_attention_plan(B=B, S=S, T=T, R=R, causal=bool(case.causal), **options)
    item = DTYPES[case.dtype].itemsize
    queries, keys = B * S * R * item, B * R * T * item
    held = {"q": queries, "k": keys, "v": keys, "y": queries}
    if case.mode != "train":
        return {"forward_peak_bytes": {**held, "sums": plan["forward_scratch"]}}
    kept = {"carries": plan["carries"]}
    gradients = {"grad_y, expanded": item, "dq": queries, "dk": keys, "dv": keys}
    return {
        "forward_peak_bytes": {**held, **kept, "sums": plan["forward_sums"]},
        "saved_bytes": kept,
        "backward_peak_bytes": {**held, **kept, **gradients, "scratch": plan["backward_scratch"]},
    }


def linear_terms(case: Case) -> Terms | None:
    """From the plan of the kernels themselves, exact on the CPU in every dtype."""
    if case.heads is None or case.kv_len is None:
        return None
    from memcheck._extension import _C

    D = case.dim // case.heads
    plan = _C.linear_attention_plan(
        B=case.bsz,
        H=case.heads,
        Hkv=case.heads,
        S=case.query_len,
        T=case.kv_len,
        D=D,
        Dv=D,
        causal=case.causal,
        dtype=case.dtype,
        threads=torch.get_num_threads(),
        device=case.device,
    )
    item = DTYPES[case.dtype].itemsize
    queries, keys = (case.bsz * length * case.dim * item for length in (case.query_len, case.kv_len))
    held = {"q": queries, "k": keys, "v": keys, "y": queries}
    forward = {**held, "states and tiles": plan["forward_scratch"]}
    if case.mode != "train":
        return {"forward_peak_bytes": forward}
    gradients = {"grad_y, expanded": item, "dq": queries, "dk": keys, "dv": keys}
    return {
        "forward_peak_bytes": forward,
        "saved_bytes": {},
        "backward_peak_bytes": {**held, **gradients, "states and tiles": plan["backward_scratch"]},
    }


def combinator_terms(case: Case) -> Terms | None:
    """From the plan the glue allocates by. Exact on the CPU in fp32 and fp64, where 16-bit GEMM takes more, past any
    plan; on CUDA but for cuBLAS's workspace, which records tell apart."""
    device = case.device.partition(":")[0]
    if device not in ("cpu", "cuda") or (device == "cpu" and case.dtype not in ("float32", "float64")):
        return None
    from memcheck._extension import _C

    item = DTYPES[case.dtype].itemsize
    N, E = case.bsz * case.query_len, case.dim
    plan = _C.combinator_plan(N=N, E=E, dtype=case.dtype, copies=False, device=device)
    tokens, weight = N * E * item, 2 * E * E * item
    held = {"x": tokens, "weight": weight, "y": tokens}
    chunk = {"pre-activations of a chunk": plan["chunk"]}
    if case.mode != "train":
        return {"forward_peak_bytes": {**held, **chunk}}
    low_memory = case.operator == "combinator-low-memory"
    kept = {} if low_memory else {"pre-activations": plan["preactivations"]}
    gradients = {"grad_y, expanded": item, "dx": tokens, "dweight": weight}
    if plan["sums"]:
        gradients["dweight in fp32"] = plan["sums"]
    return {
        "forward_peak_bytes": {**held, **(kept or chunk)},
        "saved_bytes": kept,
        "backward_peak_bytes": {**held, **kept, **gradients, **chunk},
    }


def compressed_terms(case: Case) -> Terms | None:
    """From the plan of the device's kernels themselves. Exact on the CPU in every dtype."""
    if case.device not in ("cpu", "cuda") or case.heads is None or case.kv_len is None or case.factor is None:
        return None
    from memcheck._extension import _C

    B, H, S, T, D = case.bsz, case.heads, case.query_len, case.kv_len, case.dim // case.heads
    sizes = {"B": B, "H": H, "Hkv": H, "S": S, "T": T, "D": D, "factor": case.factor, "causal": case.causal}
    kernels = {"dtype": case.dtype, "threads": torch.get_num_threads(), "device": case.device}
    plan = _C.compressed_attention_plan(**sizes, **kernels)
    item = DTYPES[case.dtype].itemsize
    queries, keys = B * H * S * D * item, B * H * T * D * item
    held = {"q": queries, "k": keys, "v": keys, "y": queries}
    blocks = {"compressed k and v": plan["compressed"]}
    if case.mode != "train":
        return {"forward_peak_bytes": {**held, **blocks, "scratch": plan["forward_scratch"]}}
    kept = {**blocks, "log-sum-exp": plan["lse"]}
    gradients = {"grad_y, expanded": item, "dq": queries, "dk": keys, "dv": keys}
    scratch = {"delta": plan["delta"], "scratch": plan["backward_scratch"]}
    return {
        "forward_peak_bytes": {**held, **kept, "scratch": plan["forward_scratch"]},
        "saved_bytes": kept,
        "backward_peak_bytes": {**held, **kept, **gradients, **scratch},
    }


def cache_terms(case: Case) -> Terms | None:
    """k and v of every token so far."""
    _, keys, _ = tensor_bytes(case)
    return {"state_bytes": {"k cache": keys, "v cache": keys}}


def naive_step_terms(case: Case) -> Terms | None:
    """In fp32 and fp64 with its peak: both caches are alive twice, the old one and the one that is a token longer."""
    if case.dtype not in ("float32", "float64") or case.device != "cpu" or case.kv_len is None:
        return cache_terms(case)
    token, keys, row = tensor_bytes(case)  # of one query: q, and a row of scores
    row += row // case.kv_len
    number = {"sqrt_D": 8, "sqrt_D_in_fp32": 4 if case.dtype == "float32" else 0}
    memory = Ledger(q=token, k=token, v=token, k_cache=keys, v_cache=keys)
    memory.take(new_k_cache=keys + token, new_v_cache=keys + token)
    memory.take(products=row)
    memory.replace("products", *number, scores=row, **number)
    memory.take(probabilities=row)
    memory.take(y=token)
    return {"state_bytes": {"k cache": keys, "v cache": keys}, "forward_peak_bytes": memory.peak}


def sum_bytes(case: Case) -> int:
    """Of one element of a sum that a state keeps."""
    return torch.promote_types(DTYPES[case.dtype], torch.float32).itemsize


def softplus_state_terms(case: Case) -> Terms | None:
    sums = case.bsz * (case.core_dim or 0) * sum_bytes(case)
    return {"state_bytes": {"sum of weights": sums, "sum of weighted values": sums}}


def linear_state_terms(case: Case) -> Terms | None:
    features = case.bsz * case.dim * sum_bytes(case)
    products = features * (case.dim // (case.heads or 1))
    return {"state_bytes": {"sum of features times values": products, "sum of features": features}}


def compressed_state_terms(case: Case) -> Terms | None:
    blocks = (case.kv_len or 0) // (case.factor or 1)
    means, sums = (case.bsz * case.dim * size for size in (blocks * DTYPES[case.dtype].itemsize, sum_bytes(case)))
    return {"state_bytes": {"means of k": means, "means of v": means, "open sum of k": sums, "open sum of v": sums}}
