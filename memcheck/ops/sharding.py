"""How torch.distributed.tensor runs the operators on sharded tensors: by batch, heads or channels.

Each operator has a formula in the manner of einsum, with a letter for each dimension of its tensors. A letter by which
it may be sharded shards every tensor that has it. Arguments without the letter are replicated, and results without it
are sums over it, of which each process has its part. Importing this module registers all of them.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from memcheck._extension import MISSING


class Formula(NamedTuple):
    """Letters of the tensor arguments and of the results, in the order of the schema.

    "*" stands for all leading dimensions, "|" for a choice by the number of dimensions, "." for a dimension that is
    sharded by no letter. Query and key heads have the same letter: a shard has the key heads of its query heads.
    """

    arguments: str
    results: str
    shardable: str = "BH"


QKV, STATE, LISTS = "BHSD BHTD BHTV", "BHDV BHD", ". . B"  # cu_seqlens_q, cu_seqlens_k, lengths
POOLED = f"BHSD BHSD BHCD BHCD BHSD BHS BHS H BHTD BHTD {LISTS}"
CHANNELS = "BSH BHT BHT"
FORMULAS = {
    "softplus_attention": Formula(f"{CHANNELS} .BH .BH {LISTS}", "BSH BC.H .BH .BH"),
    "softplus_attention_backward": Formula(f"BSH {CHANNELS} BC.H .BH .BH .BH {LISTS}", f"{CHANNELS} .BH .BH"),
    "softplus_attention_step": Formula(f"{CHANNELS} BH BH", "BSH BH BH"),
    "linear_attention": Formula(f"{QKV} H|BHT {STATE} {LISTS}", f"BHSV {STATE}"),
    "linear_attention_backward": Formula(f"BHSV {STATE} {QKV} H|BHT {STATE} {STATE} {LISTS}", f"{QKV} H|BHT {STATE}"),
    "linear_attention_step": Formula(f"{QKV} {STATE}", f"BHSV {STATE}"),
    "compressed_attention": Formula(f"{QKV} H {LISTS}", "BHSD BHS BHCD BHCD"),
    "compressed_attention_backward": Formula(POOLED, f"{QKV} H"),
    "compressed_attention_pooled": Formula(f"BHSD BHCD BHCD H BHTD BHTD {LISTS}", "BHSD BHS"),
    "compressed_attention_pooled_backward": Formula(POOLED, "BHSD BHCD BHCD H BHTD BHTD"),
    "compressed_attention_extend": Formula("BHTD BHTD BHD BHD", "BHCD BHCD BHD BHD"),
    "compressed_attention_extend_backward": Formula("BHCD BHCD BHD BHD .", "BHTD BHTD BHD BHD"),
    "combinator": Formula("*E .RE", "*E *P", "*"),
    "combinator_backward": Formula("*E *E .RE *P", "*E .RE", "*"),
    "linear_r": Formula("BSE ER", "BSR", "BSER"),
    "linear_r_backward": Formula("BSR BSE ER", "BSE ER", "BSER"),
    "linear_l": Formula("BSE ER", "BRS", "BSER"),
    "linear_l_backward": Formula("BRS BSE ER", "BSE ER", "BSER"),
}
POSITIONS = "STC"  # letters of queries, keys and blocks, by which attention is not sharded
LEADING = "0123456789"


def _shardings(name: str, formula: Formula, *args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
    """(placements of the results, of the arguments) for each way to run the operator over one dimension of a mesh."""
    of_schema = [x.name for x in _schema(name).arguments]
    given = dict(zip(of_schema, args, strict=False)) | kwargs
    tensors = [x.name for x in _schema(name).arguments if "Tensor" in str(x.type)]
    specs = {x: given[x] for x in tensors if hasattr(given.get(x), "placements")}
    of_arguments = dict(zip(tensors, formula.arguments.split(), strict=True))
    letters = {x: _letters(of_arguments[x], len(spec.shape)) for x, spec in specs.items()}
    _check_positions(name, letters, specs)
    dimensions = len(next(iter(specs.values())).shape)
    shardable = LEADING[: dimensions - 1] if formula.shardable == "*" else formula.shardable
    if "cu_seqlens_q" in specs:  # Sequences that are packed are not rows of a batch.
        shardable = shardable.replace("B", "")
    results = [letters.get("decay", "") if "|" in x else _letters(x, dimensions) for x in formula.results.split()]
    ways = [letter for letter in shardable if _splits_alike(letter, letters, specs)]
    return [
        (
            [_placement(letter, x, Partial()) for x in results],
            [_placement(letter, letters[x], Replicate()) for x in specs],
        )
        for letter in ["", *ways]
    ]


def _schema(name: str) -> Any:
    return getattr(torch.ops.memcheck, name).default._schema


def _letters(formula: str, dimensions: int) -> str:
    """The letter of each dimension of one tensor."""
    if "|" in formula:
        return next((x for x in formula.split("|") if len(x) == dimensions), "")
    return formula.replace("*", LEADING[: dimensions - len(formula) + 1])


def _placement(letter: str, letters: str, otherwise: Any) -> Any:
    if not letter:
        return Replicate()
    return Shard(letters.index(letter)) if letter in letters else otherwise


def _splits_alike(letter: str, letters: dict[str, str], specs: dict[str, Any]) -> bool:
    """Whether shards by this letter belong together: sizes are equal, or all multiples of the number of shards."""
    sizes = {spec.shape[letters[x].index(letter)] for x, spec in specs.items() if letter in letters[x]}
    mesh = next(iter(specs.values())).mesh
    numbers = [math.prod(some) for n in range(mesh.ndim) for some in itertools.combinations(mesh.shape, n + 1)]
    # DTensor itself leaves no shard empty.
    return len(sizes) == 1 or all(size % n == 0 for n in numbers if n <= min(sizes) for size in sizes)


def _check_positions(name: str, letters: dict[str, str], specs: dict[str, Any]) -> None:
    """NotImplementedError if the sequence is sharded. Sharded gradients are allowed: they may be gathered."""
    op = next((x for x in ("softplus_attention", "linear_attention", "compressed_attention") if x in name), None)
    if op is None or name.endswith("backward"):
        return
    for x, spec in specs.items():
        for placement in spec.placements:
            if placement.is_shard() and letters[x][placement.dim] in POSITIONS:
                raise NotImplementedError(
                    f"{name}: {x} is sharded along its positions, dimension {placement.dim}, and attention needs those "
                    f"of all processes: call memcheck.distributed.{op} with each process's to_local()"
                )


def _register(name: str, formula: Formula) -> None:
    operator = getattr(torch.ops.memcheck, name).default
    register_sharding(operator)(partial(_shardings, name, formula))
    # A decision is reused for a call with the same options. register_sharding compares only those that are ints.
    options = [x.name for x in operator._schema.arguments if x.kwarg_only and "Tensor" not in str(x.type)]
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator].static_kwargkey = options


for _name, _formula in FORMULAS.items() if MISSING is None else ():
    _register(_name, _formula)
