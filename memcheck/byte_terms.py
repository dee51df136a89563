"""Bytes that follow from the shapes alone: for each contender what is alive when most is, by name.

Exact on the CPU, where nothing else is said, and tested to be; None for what is not known. CUDA's terms are those of
the tensors: what cuBLAS takes comes on top.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from memcheck.cases import DTYPES, Case, Terms


class Ledger:
    """What is alive as a computation goes on, and what was when most was. Names may have underscores for spaces."""

    def __init__(self, **held: int) -> None:
        self.alive = dict(held)
        self.peak: dict[str, int] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """A new peak, from what is alive now."""
        self.peak = spaced(self.alive)

    def take(self, **sizes: int) -> None:
        self.alive.update(sizes)
        if sum(self.alive.values()) > sum(self.peak.values()):
            self.peak = spaced(self.alive)

    def free(self, *names: str) -> None:
        for name in names:
            del self.alive[name]

    def replace(self, *names: str, **sizes: int) -> None:
        """What is made from things that are freed as soon as it is there."""
        self.take(**sizes)
        self.free(*names)

    def rename(self, name: str, other: str) -> None:
        self.alive[other] = self.alive.pop(name)


def unless_training(case: Case, *names: str) -> tuple[str, ...]:
    """What nobody keeps where there is no backward."""
    return () if case.mode == "train" else names


def spaced(sizes: dict[str, int]) -> dict[str, int]:
    return {name.replace("_", " "): size for name, size in sizes.items() if size}


def train_terms(memory: Ledger, kept: tuple[str, ...], backward: Callable[[], None]) -> Terms:
    """The fields of a record, from a forward that is over and a backward that is to come."""
    terms = {
        "forward_peak_bytes": memory.peak,
        "saved_bytes": spaced({name: memory.alive[name] for name in kept}),
    }
    memory.begin_anew()
    backward()
    return {**terms, "backward_peak_bytes": memory.peak}


def tensor_bytes(case: Case) -> tuple[int, int, int]:
    """Of q or y, of k or v, and of an (S,T) matrix for each batch and head."""
    assert case.kv_len is not None
    item = DTYPES[case.dtype].itemsize
    pairs = case.bsz * (case.heads or 1) * case.query_len * case.kv_len
    return case.bsz * case.query_len * case.dim * item, case.bsz * case.kv_len * case.dim * item, pairs * item


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
        gradients = naive_backward_terms(kept, queries, keys, matrix)
        terms["backward_peak_bytes"] = {**held, "grad_y, expanded": item, **gradients}
    return terms


def products_are_plain(case: Case) -> bool:
    """Not so in 16 bits where oneDNN has instructions for them, and takes scratch of its own."""
    if case.dtype == "float16" and platform.machine() == "x86_64" and torch.backends.mkldnn.is_available():
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return case.dtype in ("float32", "float64")


def naive_backward_terms(kept: dict[str, int], queries: int, keys: int, matrix: int) -> dict[str, int]:
    """The fullest of three moments: the softmax's derivative, the products for dq and dk, the copy into k's layout."""
    moments = (
        {**kept, "gradient of probabilities": matrix, "gradient of scores": matrix, "dv": keys},
        {"gradient of scores": matrix, "dq": queries, "dk": keys, "dv": keys},
        {"dq": queries, "dk, transposed": keys, "dk, laid out like k": keys, "dv": keys},
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def softplus_terms(case: Case) -> Terms | None:
    """Exact on the CPU in every dtype, from the plan of the kernels themselves."""
    if case.device != "cpu" or case.core_dim is None or case.kv_len is None:
        return None
    from memcheck._extension import _C

    B, S, T, R = case.bsz, case.query_len, case.kv_len, case.core_dim
    threads = torch.get_num_threads()
    plan = _C.softplus_attention_plan(B=B, S=S, T=T, R=R, causal=bool(case.causal), dtype=case.dtype, threads=threads)
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
    """Exact on the CPU in every dtype, from the plan of the kernels themselves."""
    if case.device != "cpu" or case.heads is None or case.kv_len is None:
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
    """Exact on the CPU in fp32 and fp64, from the plan the glue allocates by; 16-bit GEMM takes more, past any plan."""
    if case.dtype not in ("float32", "float64") or case.device != "cpu":
        return None
    from memcheck._extension import _C

    item = DTYPES[case.dtype].itemsize
    N, E = case.bsz * case.query_len, case.dim
    plan = _C.combinator_plan(N=N, E=E, dtype=case.dtype, copies=False)
    tokens, weight = N * E * item, 2 * E * E * item
    held = {"x": tokens, "weight": weight, "y": tokens}
    chunk = {"pre-activations of a chunk": plan["chunk"]}
    if case.mode != "train":
        return {"forward_peak_bytes": {**held, **chunk}}
    low_memory = case.operator == "combinator-low-memory"
    kept = {} if low_memory else {"pre-activations": plan["preactivations"]}
    gradients = {"grad_y, expanded": item, "dx": tokens, "dweight": weight}
    return {
        "forward_peak_bytes": {**held, **(kept or chunk)},
        "saved_bytes": kept,
        "backward_peak_bytes": {**held, **kept, **gradients, **chunk},
    }


def compressed_terms(case: Case) -> Terms | None:
    """Exact on the CPU in every dtype, from the plan of the kernels themselves."""
    if case.device != "cpu" or case.heads is None or case.kv_len is None or case.factor is None:
        return None
    from memcheck._extension import _C

    B, H, S, T, D = case.bsz, case.heads, case.query_len, case.kv_len, case.dim // case.heads
    sizes = {"B": B, "H": H, "Hkv": H, "S": S, "T": T, "D": D, "factor": case.factor, "causal": case.causal}
    plan = _C.compressed_attention_plan(**sizes, dtype=case.dtype, threads=torch.get_num_threads())
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


# A Python number becomes a tensor of 8 bytes, kept where a gradient will want it, and a copy in the operand's type.
NUMBER = {"number": 8, "number_in_fp32": 4}


def copied_gradient(case: Case, queries: int) -> int:
    """The expanded gradient of y as a matrix product takes it: a batch at a time on the CPU, whole on CUDA."""
    return queries // (case.bsz * (case.heads or 1)) if case.device == "cpu" else queries


def cs336_naive_terms(case: Case) -> Terms | None:
    """In fp32. A softmax written by hand: six score matrices at the peak of its backward."""
    if case.dtype != "float32" or case.kv_len is None:
        return None
    queries, keys, matrix = tensor_bytes(case)
    rows = case.bsz * case.query_len * 4
    memory = Ledger(q=queries, k=keys, v=keys)

    memory.take(products=matrix)
    memory.replace("products", "number_in_fp32", scores=matrix, **NUMBER)
    memory.free(*unless_training(case, "number"))
    memory.take(maxima=rows, places_of_maxima=2 * rows)
    memory.replace("maxima", *unless_training(case, "places_of_maxima"), shifted=matrix)
    memory.take(exponentials=matrix)
    memory.take(sums=rows)
    memory.replace("shifted", *unless_training(case, "exponentials", "sums"), probabilities=matrix)
    memory.replace("scores", y=queries)
    if case.mode != "train":
        return {"forward_peak_bytes": memory.peak}

    def backward() -> None:
        memory.take(grad_y_expanded=4)
        copied = copied_gradient(case, queries)
        memory.replace("grad_y_copied", dv=keys, grad_y_copied=copied)
        memory.replace("grad_y_copied", "probabilities", d_probabilities=matrix, grad_y_copied=copied)
        # probabilities = exponentials / sums, whose derivative by sums is -exponentials / sums / sums.
        memory.take(quotients=matrix)
        memory.take(quotients_by_sums=matrix)
        memory.take(d_probabilities_negated=matrix)
        memory.replace("quotients", "quotients_by_sums", "d_probabilities_negated", d_sums_by_key=matrix)
        memory.take(d_quotients=matrix)
        memory.replace("d_probabilities", "d_sums_by_key", "sums", d_sums=rows)
        memory.replace("d_quotients", "d_sums", d_exponentials=matrix)
        memory.replace("d_exponentials", "exponentials", d_shifted=matrix)
        memory.take(d_shifted_negated=matrix)
        memory.replace("d_shifted_negated", d_maxima=rows)
        memory.take(zeros=matrix)
        memory.replace("zeros", "places_of_maxima", "d_maxima", d_maxima_at_places=matrix)
        memory.replace("d_shifted", "d_maxima_at_places", d_scores=matrix)
        memory.replace("d_scores", "number", "number_in_fp32", d_products=matrix, number_in_fp32=4)
        memory.take(dk=keys)
        memory.replace("d_products", dq=queries)
        memory.take(dk_laid_out_like_k=keys)

    return train_terms(memory, ("exponentials", "probabilities", "sums", "places_of_maxima", "number"), backward)


def math_terms(case: Case) -> Terms | None:
    """In fp32. SDPA's math backend, on heads or on three dimensions."""
    if case.dtype != "float32" or case.kv_len is None or (case.causal and case.query_len != case.kv_len):
        return None
    queries, keys, matrix = tensor_bytes(case)
    numbers = tuple(NUMBER)
    memory = Ledger(q=queries, k=keys, v=keys)

    memory.replace(*numbers, scaled_q=queries, **NUMBER)
    if case.causal:
        seen = case.query_len * case.kv_len
        memory.replace("ones", ones=seen, seen=seen)
        memory.replace("seen", "zero", "infinity", mask=4 * seen, zero=4, infinity=4)
    memory.replace(*numbers, scaled_k=keys, **NUMBER)
    memory.take(products=matrix)
    memory.free(*unless_training(case, "scaled_k"))
    if case.causal:
        memory.replace("products", scores=matrix)
    else:
        memory.rename("products", "scores")
    # A row of scores that are all -inf gives zeros, not NaN.
    hidden = {"hidden": matrix // 4, "hidden_rows": case.bsz * (case.heads or 1) * case.query_len, "zero": 4}
    memory.replace("scores", *hidden, probabilities=matrix, **hidden)
    memory.take(y=queries)
    if case.mode != "train":
        return {"forward_peak_bytes": memory.peak}
    memory.alive.pop("mask", None)

    def backward() -> None:
        memory.take(grad_y_expanded=4)
        copied = copied_gradient(case, queries)
        memory.replace("grad_y_copied", dv=keys, grad_y_copied=copied)
        memory.replace("grad_y_copied", d_probabilities=matrix, grad_y_copied=copied)
        softmax_backward(case, memory, matrix)
        memory.take(d_scaled_k=keys)
        memory.replace("d_scores", "scaled_k", "scaled_q", d_scaled_q=queries)
        memory.replace("d_scaled_k", *numbers, dk=keys, **NUMBER)
        memory.take(dk_laid_out_like_k=keys)
        memory.free("dk")
        memory.replace("d_scaled_q", *numbers, dq=queries, **NUMBER)

    return train_terms(memory, ("scaled_q", "scaled_k", "probabilities"), backward)


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


def linear_cumsum_terms(case: Case) -> Terms | None:
    """In fp32 on the CPU. A (D,D) state for each key, four times at the peak of the backward."""
    if case.dtype != "float32" or case.device != "cpu" or case.heads is None or case.kv_len in (None, 1):
        return None
    queries, keys, _ = tensor_bytes(case)
    states, rows = keys * (case.dim // case.heads), 4 * case.bsz * case.heads * case.query_len
    sliced = case.query_len < (case.kv_len or 0)
    # A product folds all dimensions but the last two into one, which takes a copy where slices lie apart.
    apart = sliced and case.query_len > 1 and case.bsz * case.heads > 1
    of_queries = states * case.query_len // (case.kv_len or 1)
    copied = of_queries if apart else 0
    memory = Ledger(q=queries, k=keys, v=keys)

    for name, size in (("q", queries), ("k", keys)):
        features(case, memory, name, size)
    memory.take(products=states)
    memory.replace("products", states=states)
    memory.take(states_of_queries=copied)
    memory.take(numerator=queries)
    memory.free(*unless_training(case, "states_of_queries"))
    memory.take(sums_of_phi_k=keys)
    memory.take(weighted=queries)
    memory.free(*unless_training(case, "sums_of_phi_k"))
    memory.replace("weighted", sums=rows)
    memory.replace("sums", *NUMBER, denominator=rows, **NUMBER)
    memory.take(y=queries)
    if case.mode != "train":
        return {"forward_peak_bytes": memory.peak}
    if copied:
        memory.free("states")

    def backward() -> None:
        memory.take(grad_y_expanded=4)
        # y = numerator / denominator, whose derivative by the denominator is -numerator / denominator / denominator.
        memory.take(quotients=queries, quotients_again=queries, grad_y_negated=queries)
        memory.replace("quotients", "quotients_again", "grad_y_negated", d_denominator_by_channel=queries)
        memory.take(d_numerator=queries)
        memory.replace("d_denominator_by_channel", "numerator", "denominator", d_denominator=rows)
        memory.take(d_phi_q_by_denominator=queries, d_sums=queries)
        memory.free("d_denominator", "sums_of_phi_k")
        if sliced:
            memory.replace("d_sums", d_sums_of_phi_k=keys)
        else:
            memory.rename("d_sums", "d_sums_of_phi_k")
        cumsum_backward(memory, "d_sums_of_phi_k", "d_phi_k", keys)
        memory.take(d_states_of_queries=of_queries)
        memory.take(d_phi_q_by_numerator=queries)
        memory.free("states_of_queries" if copied else "states", "phi_q", "d_numerator")
        if sliced:
            memory.replace("d_states_of_queries", d_states=states)
        else:
            memory.rename("d_states_of_queries", "d_states")
        memory.replace("d_phi_q_by_denominator", "d_phi_q_by_numerator", d_phi_q=queries)
        cumsum_backward(memory, "d_states", "d_products", states)

    kept = ("q_above_0", "exp_q", "phi_q", "k_above_0", "exp_k", "phi_k", "numerator", "denominator", "sums_of_phi_k")
    return train_terms(memory, (*kept, "states_of_queries" if copied else "states"), backward)


def features(case: Case, memory: Ledger, name: str, size: int) -> None:
    """torch.where(x > 0, x + 1, x.clamp(max=0).exp()), of which a backward reads all but the branches as they were."""
    above, exponential = f"{name}_above_0", f"exp_{name}"
    memory.replace(*NUMBER, **{above: size // 4}, **NUMBER)
    memory.replace(*NUMBER, plus_1=size, **NUMBER)
    memory.take(at_most_0=size)
    memory.replace("at_most_0", **{exponential: size})
    memory.replace("plus_1", *unless_training(case, above, exponential), **{f"phi_{name}": size})


def cumsum_backward(memory: Ledger, gradient: str, name: str, size: int) -> None:
    """The same sums from the other end: turned round, summed, turned back."""
    memory.take(turned_round=size)
    memory.take(summed=size)
    memory.replace(gradient, "turned_round", "summed", **{name: size})


def softmax_backward(case: Case, memory: Ledger, matrix: int) -> None:
    """On CUDA it multiplies the gradient by the probabilities in a matrix of its own first."""
    product = {"d_probabilities_times_probabilities": 0 if case.device == "cpu" else matrix}
    memory.replace("d_probabilities", "probabilities", *product, d_scores=matrix, **product)


def memcheck_pyt_naive_terms(case: Case) -> Terms | None:
    """In fp32."""
    if case.dtype != "float32" or case.heads is None or case.kv_len is None:
        return None
    queries, keys, matrix = tensor_bytes(case)
    weight, pairs = 4 * case.dim**2, 4 * case.query_len * case.kv_len
    # A product reads strided heads in place where it need not fold batch and heads into one dimension.
    folded = case.bsz > 1 and case.heads > 1
    by_heads = {
        name: size if folded and length > 1 else 0
        for name, size, length in (
            ("q_by_heads", queries, case.query_len),
            ("k_by_heads", keys, case.kv_len),
            ("v_by_heads", keys, case.kv_len),
        )
    }
    memory = Ledger(q=queries, k=keys, v=keys, weights=4 * weight)

    memory.take(q_by_heads=by_heads["q_by_heads"])
    memory.take(k_by_heads=by_heads["k_by_heads"])
    memory.take(products=matrix)
    memory.free(*unless_training(case, "q_by_heads", "k_by_heads"))
    memory.replace("products", "number_in_fp32", scores=matrix, **NUMBER)
    memory.free(*unless_training(case, "number"))
    if case.causal:
        memory.replace("mask_of_all", mask_of_all=pairs, mask=pairs)
    memory.replace("scores", probabilities=matrix)
    memory.take(v_by_heads=by_heads["v_by_heads"])
    memory.take(y_by_heads=queries)
    memory.free(*unless_training(case, "v_by_heads"))
    if case.heads > 1 and case.query_len > 1:
        memory.replace("y_by_heads", y_of_all_heads=queries)
    else:
        memory.rename("y_by_heads", "y_of_all_heads")
    memory.take(y=queries)
    if case.mode != "train":
        return {"forward_peak_bytes": memory.peak}
    memory.alive.pop("mask", None)

    def backward() -> None:
        memory.take(grad_y_expanded=4)
        memory.take(grad_y_copied=queries)
        memory.replace("grad_y_copied", dweight=weight)
        memory.take(grad_y_copied=queries)
        memory.replace("grad_y_copied", "y_of_all_heads", d_y_of_all_heads=queries)
        memory.replace("d_y_of_all_heads", d_y_by_heads=queries)
        memory.take(dv_by_heads=keys)
        memory.replace("d_y_by_heads", "v_by_heads", d_probabilities=matrix)
        softmax_backward(case, memory, matrix)
        memory.replace("d_scores", "number", "number_in_fp32", d_products=matrix, number_in_fp32=4)
        memory.take(dk_by_heads=keys)
        memory.replace("d_products", "q_by_heads", "k_by_heads", dq_by_heads=queries)
        memory.replace("dv_by_heads", dv=keys)
        memory.replace("dk_by_heads", dk=keys)
        memory.replace("dq_by_heads", dq=queries)

    kept = ("q_by_heads", "k_by_heads", "v_by_heads", "probabilities", "y_of_all_heads", "number")
    return train_terms(memory, kept, backward)


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
