"""Grids of cases: products of lists and ranges of sizes, and presets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memcheck.bench.case import CONTENDERS, MODES, Case
from memcheck.bench.catalog import check_case, make_case, make_combinator_case
from memcheck.core.errors import UsageError, spelled_as, unknown_name
from memcheck.core.options import named

# The defaults of every flag. A preset or a TOML file overrides them; the parts in its `grid` override it in turn.
BASE: dict[str, Any] = {
    "attention-type": "naive,softmax,softplus,linear-causal,compressed",
    "bsz": 1,
    "seq-len": "256:4096:x2",
    "dim": 256,
    "heads": 4,
    "dtype": "float32",
    "mode": "train",
    "causal": True,
}
PRESETS: dict[str, dict[str, Any]] = {
    # Memory against length, and against dimension.
    "quick": {"grid": [{"seq-len": "256:2048:x2", "dim": 256}, {"seq-len": 1024, "dim": "64:512:x2"}]},
    "memcheck-pyt": {
        "attention-type": "memcheck-pyt/naive,memcheck-pyt/softmax,memcheck-pyt/softplus,memcheck-pyt/combinator",
        "bsz": 64,
        "heads": 8,
        "grid": [{"seq-len": "512:8192:x2", "dim": "32:8192:x2"}, {"seq-len": "32:8192:x2", "dim": "128:2048:x2"}],
    },
    "cs336": {
        "attention-type": "cs336/naive",
        "bsz": 8,
        "seq-len": "256,1024,4096,8192,16384",
        "dim": "16:128:x2",
        "passes": 100,
        "grid": [{"compile": False}, {"compile": True}],
    },
    "ato": {
        "attention-type": "naive,linear,linear-causal",
        "bsz": 4,
        "heads": 8,
        "dim": 512,
        "seq-len": "512:8192:x2",
        "dtype": "float16",
    },
}


@dataclass(frozen=True)
class Grid:
    """A grid: every combination is a case; S and T are paired."""

    operators: list[str]
    lengths: list[tuple[int, int]]
    bsz: list[int]
    dim: list[int]
    heads: list[int]
    dtype: list[str]
    mode: list[str]
    causal: bool = True
    compile: bool = False
    core_dim: Sequence[int | None] = (None,)
    factor: Sequence[int | None] = (None,)
    window: Sequence[int | None] = (None,)

    def cases(self, device: str) -> Iterator[Case]:
        """All combinations, including those that no operator accepts; check_case gives their reason."""
        operators = check_names(named("attention_type"), self.operators, list(CONTENDERS))
        check_names(named("mode"), self.mode, list(MODES))
        for mode, dtype, bsz, heads, core_dim, factor, window in itertools.product(
            self.mode, self.dtype, self.bsz, self.heads, self.core_dim, self.factor, self.window
        ):
            fields = {"mode": mode, "dtype": dtype, "bsz": bsz, "compiled": self.compile, "device": device}
            sizes = {"heads": heads, "core_dim": core_dim, "factor": factor, "window": window}
            sizes |= {"causal": self.causal}
            for dim, (query_len, kv_len), operator in itertools.product(self.dim, self.lengths, operators):
                yield any_case(operator, {**fields, "dim": dim, "query_len": query_len}, {"kv_len": kv_len, **sizes})


def any_case(operator: str, fields: dict[str, Any], attention_fields: dict[str, Any]) -> Case:
    """The case of an attention or a combinator. An invalid one is returned, too; refusal() has its reason."""
    try:
        if CONTENDERS[operator].kind == "combinator":
            return make_combinator_case(operator, **fields)
        return make_case(operator, **fields, **attention_fields)
    except UsageError:
        return Case(operator, **fields, **attention_fields)


def multiply_out(grids: list[Grid], device: str) -> list[Case]:
    """The cases of all grids, each once.

    A combination that its operator does not accept stays, and becomes a row with the reason. UsageError: an operator
    accepts none of its combinations.
    """
    cases = list(dict.fromkeys(case for grid in grids for case in grid.cases(device)))
    can_run = {case.operator for case in cases if refusal(case) is None}
    for case in cases:
        if case.operator not in can_run:
            raise UsageError(refusal(case) or "")
    return cases


def refusal(case: Case) -> str | None:
    """The reason why the case cannot run at all."""
    try:
        check_case(case)
    except UsageError as error:
        return str(error)
    return None


def check_names(flag: str, names: list[str], known: list[str]) -> list[str]:
    """The names as they are known. UsageError if one is not."""
    found = [spelled_as(name, known) for name in names]
    for name in found:
        if name not in known:
            raise unknown_name(flag, name, known)
    return found
