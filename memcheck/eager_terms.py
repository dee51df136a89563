"""Byte terms of operators in plain PyTorch, written down as what torch allocates and frees line by line.

Exact on the CPU. CUDA's are those of the tensors: what cuBLAS takes comes on top.
"""

from __future__ import annotations

from collections.abc import Callable

from memcheck.byte_terms import tensor_bytes
from memcheck.cases import Case, Terms
from memcheck.ledger import Ledger, spaced

# A Python number becomes a tensor of 8 bytes, kept where a gradient will want it, and a copy in the operand's type.
NUMBER = {"number": 8, "number_in_fp32": 4}


def unless_training(case: Case, *names: str) -> tuple[str, ...]:
    """What nobody keeps where there is no backward."""
    return () if case.mode == "train" else names


def train_terms(case: Case, memory: Ledger, kept: tuple[str, ...], backward: Callable[[Case, Ledger], None]) -> Terms:
    """The fields of a record, from a forward that is over and a backward that is to come."""
    terms = {
        "forward_peak_bytes": memory.peak,
        "saved_bytes": spaced({name: memory.alive[name] for name in kept}),
    }
    memory.begin_anew()
    backward(case, memory)
    return {**terms, "backward_peak_bytes": memory.peak}


def copied_gradient(case: Case, queries: int) -> int:
    """The expanded gradient of y as a matrix product takes it: a batch at a time on the CPU, whole on CUDA."""
    if case.device != "cpu":
        return queries
    products = case.bsz * (case.heads or 1)
    return queries // products if products > 1 else 0


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
    kept = ("exponentials", "probabilities", "sums", "places_of_maxima", "number")
    return train_terms(case, memory, kept, cs336_naive_backward)


def cs336_naive_backward(case: Case, memory: Ledger) -> None:
    queries, keys, matrix = tensor_bytes(case)
    rows = case.bsz * case.query_len * 4
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
    if case.kv_len != 1:  # a single key has the same layout transposed
        memory.take(dk_laid_out_like_k=keys)


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
    return train_terms(case, memory, ("scaled_q", "scaled_k", "probabilities"), math_backward)


def math_backward(case: Case, memory: Ledger) -> None:
    queries, keys, matrix = tensor_bytes(case)
    numbers = tuple(NUMBER)
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


def linear_cumsum_terms(case: Case) -> Terms | None:
    """In fp32 on the CPU. A (D,D) state for each key, four times at the peak of the backward."""
    if case.dtype != "float32" or case.device != "cpu" or case.heads is None or case.kv_len in (None, 1):
        return None
    queries, keys, _ = tensor_bytes(case)
    rows, states, states_of_queries = cumsum_bytes(case)
    memory = Ledger(q=queries, k=keys, v=keys)

    for name, size in (("q", queries), ("k", keys)):
        features(case, memory, name, size)
    memory.take(products=states)
    memory.replace("products", states=states)
    # A product folds all dimensions but the last two into one, which takes a copy where slices lie apart.
    copied = states_of_queries < states and case.query_len > 1 and case.bsz * case.heads > 1
    if copied:
        memory.take(states_of_queries=states_of_queries)
    memory.take(numerator=queries)
    memory.free(*unless_training(case, *(["states_of_queries"] if copied else [])))
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
    kept = ("q_above_0", "exp_q", "phi_q", "k_above_0", "exp_k", "phi_k", "numerator", "denominator", "sums_of_phi_k")
    return train_terms(case, memory, (*kept, "states_of_queries" if copied else "states"), linear_cumsum_backward)


def cumsum_bytes(case: Case) -> tuple[int, int, int]:
    """Of a number for each query, and of the (D,D) states of all keys and of the queries."""
    queries, keys, _ = tensor_bytes(case)
    D = case.dim // (case.heads or 1)
    return queries // D, keys * D, queries * D


def linear_cumsum_backward(case: Case, memory: Ledger) -> None:
    queries, keys, _ = tensor_bytes(case)
    rows, states, states_of_queries = cumsum_bytes(case)
    memory.take(grad_y_expanded=4)
    # y = numerator / denominator, whose derivative by the denominator is -numerator / denominator / denominator.
    memory.take(quotients=queries, quotients_again=queries, grad_y_negated=queries)
    memory.replace("quotients", "quotients_again", "grad_y_negated", d_denominator_by_channel=queries)
    memory.take(d_numerator=queries)
    memory.replace("d_denominator_by_channel", "numerator", "denominator", d_denominator=rows)
    memory.take(d_phi_q_by_denominator=queries, d_sums=queries)
    memory.free("d_denominator", "sums_of_phi_k")
    widened(memory, "d_sums", "d_sums_of_phi_k", queries, keys)
    cumsum_backward(memory, "d_sums_of_phi_k", "d_phi_k", keys)
    memory.take(d_states_of_queries=states_of_queries)
    memory.take(d_phi_q_by_numerator=queries)
    memory.free("states_of_queries" if "states_of_queries" in memory.alive else "states", "phi_q", "d_numerator")
    widened(memory, "d_states_of_queries", "d_states", states_of_queries, states)
    memory.replace("d_phi_q_by_denominator", "d_phi_q_by_numerator", d_phi_q=queries)
    cumsum_backward(memory, "d_states", "d_products", states)


def widened(memory: Ledger, gradient: str, name: str, part: int, whole: int) -> None:
    """The gradient of a slice, with zeros for what it left out."""
    if part < whole:
        memory.replace(gradient, **{name: whole})
    else:
        memory.rename(gradient, name)


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
    """In fp32. Beside the scores, q, k and v by heads, and y of all heads for the projection."""
    if case.dtype != "float32" or case.heads is None or case.kv_len is None:
        return None
    queries, keys, matrix = tensor_bytes(case)
    pairs = 4 * case.query_len * case.kv_len
    # A product reads strided heads in place where it need not fold batch and heads into one dimension.
    folded = case.bsz > 1 and case.heads > 1
    q_by_heads, k_by_heads = queries * (folded and case.query_len > 1), keys * (folded and case.kv_len > 1)
    memory = Ledger(q=queries, k=keys, v=keys, weights=4 * weight_bytes(case))

    memory.take(q_by_heads=q_by_heads)
    memory.take(k_by_heads=k_by_heads)
    memory.take(products=matrix)
    memory.free(*unless_training(case, "q_by_heads", "k_by_heads"))
    memory.replace("products", "number_in_fp32", scores=matrix, **NUMBER)
    memory.free(*unless_training(case, "number"))
    if case.causal:
        memory.replace("mask_of_all", mask_of_all=pairs, mask=pairs)
    memory.replace("scores", probabilities=matrix)
    memory.take(v_by_heads=k_by_heads)
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
    kept = ("q_by_heads", "k_by_heads", "v_by_heads", "probabilities", "y_of_all_heads", "number")
    return train_terms(case, memory, kept, memcheck_pyt_naive_backward)


def weight_bytes(case: Case) -> int:
    """Of one of its four weights (E,E)."""
    return 4 * case.dim**2


def memcheck_pyt_naive_backward(case: Case, memory: Ledger) -> None:
    queries, keys, matrix = tensor_bytes(case)
    memory.take(grad_y_expanded=4)
    memory.take(grad_y_copied=queries)
    memory.replace("grad_y_copied", dweight=weight_bytes(case))
    memory.take(grad_y_copied=queries)
    memory.replace("grad_y_copied", "y_of_all_heads", d_y_of_all_heads=queries)
    memory.replace("d_y_of_all_heads", d_y_by_heads=queries)
    memory.take(dv_by_heads=keys)
    memory.replace("d_y_by_heads", "v_by_heads", d_probabilities=matrix)
    softmax_backward(case, memory, matrix)
    memory.replace("d_scores", "number", "number_in_fp32", d_products=matrix, number_in_fp32=4)
    memory.take(dk_by_heads=keys)
    memory.replace("d_products", "q_by_heads", "k_by_heads", dq_by_heads=queries)
    # A single position lies by heads as it lies in a row.
    for name, length, size in (("dv", case.kv_len, keys), ("dk", case.kv_len, keys), ("dq", case.query_len, queries)):
        if length == 1:
            memory.rename(f"{name}_by_heads", name)
        else:
            memory.replace(f"{name}_by_heads", **{name: size})
