"""Grids: ranges, presets, and combinations that fit no operator."""

from __future__ import annotations

from collections import Counter

import pytest

from memcheck.bench.case import CONTENDERS, Case
from memcheck.bench.sweep.grid import Grid, multiply_out, refusal
from memcheck.core.errors import UsageError


def grid(operators: str, **axes: object) -> Grid:
    base = {"lengths": [(8, 8)], "bsz": [1], "dim": [16], "heads": [2], "dtype": ["fp32"], "mode": ["train"]}
    return Grid(operators.split(), **{**base, "causal": True, **axes})


def test_every_combination_once() -> None:
    axes = {
        "bsz": [1, 2],
        "dim": [16, 32],
        "heads": [2, 4],
        "dtype": ["fp32", "bfloat16"],
        "mode": ["train", "inference"],
    }
    cases = multiply_out([grid("naive softplus", **axes, lengths=[(8, 8), (4, 8)])], "cpu")
    # Softplus has no heads: there the two are one.
    assert Counter(case.operator for case in cases) == {"naive": 64, "softplus": 32}
    assert len(set(cases)) == len(cases)
    assert {case.dtype for case in cases} == {"float32", "bfloat16"}
    assert Case("naive", 2, 4, 8, 32, 4, dtype="bfloat16", mode="inference") in cases


def test_parts_are_added_up_and_combinators_join_in() -> None:
    parts = [grid("naive combinator", dim=[16, 32]), grid("naive combinator", dim=[32, 64])]
    cases = multiply_out(parts, "cpu")
    assert [(case.operator, case.dim, case.kv_len) for case in cases] == [
        ("naive", 16, 8),
        ("combinator", 16, None),
        ("naive", 32, 8),
        ("combinator", 32, None),
        ("naive", 64, 8),
        ("combinator", 64, None),
    ]


def test_a_combination_that_fits_nothing_stays_to_be_told() -> None:
    fits, other = multiply_out([grid("naive", heads=[4, 5])], "cpu")
    assert refusal(fits) is None
    assert refusal(other) == "dim must be divisible by heads for naive, got dim 16 heads 5"


def test_an_operator_that_nothing_fits_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="dim must be divisible by heads for naive, got dim 16 heads 5"):
        multiply_out([grid("softplus naive", heads=[5])], "cpu")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"operators": ["soft"]}, "attention_type soft is unknown; did you mean softmax"),
        ({"dtype": ["int8"]}, "dtype int8 is unknown; known: fp32"),
        ({"mode": ["test"]}, "mode test is unknown; known: train, inference"),
    ],
)
def test_names_are_known(axes: dict[str, object], message: str) -> None:
    values = {**vars(grid("naive")), **axes}
    with pytest.raises(UsageError, match=message):
        multiply_out([Grid(**values)], "cpu")


def test_the_catalog_has_what_presets_name() -> None:
    from memcheck.bench.sweep.grid import PRESETS

    for preset in PRESETS.values():
        for name in preset.get("attention-type", "naive").split(","):
            assert name in CONTENDERS
