"""Grids: ranges, presets, and combinations that fit no operator."""

from __future__ import annotations

from collections import Counter

import pytest

from memcheck.bench.catalog import CONTENDERS, Case
from memcheck.bench.sweep.grid import Grid, multiply_out, refusal
from memcheck.core.errors import UsageError
from memcheck.core.units import parse_sizes


def grid(operators: str, **axes: object) -> Grid:
    base = {"lengths": [(8, 8)], "bsz": [1], "dim": [16], "heads": [2], "dtype": ["fp32"], "mode": ["train"]}
    return Grid(operators.split(), **{**base, "causal": True, **axes})


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", [8]),
        ("16, 32,16", [16, 32]),
        ("256:4096:x2", [256, 512, 1024, 2048, 4096]),
        ("3:100:x3", [3, 9, 27, 81]),
        ("100:500:+200", [100, 300, 500]),
        ("100:450:+200", [100, 300]),
        ("7:7:x2", [7]),
        ("1,8:16:x2", [1, 8, 16]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must look like 8, 16,32, 256:16384:x2 or 100:500:.100, got ''"),
        ("8,", "must look like"),
        ("8:16", "must look like"),
        ("8:16:2", "must look like"),
        ("8:16:x1.5", "must look like"),
        ("0", "must be at least 1"),
        ("-3", "must be at least 1"),
        ("9" * 30, r"below 2\^63"),
        ("16:8:x2", "must go up from its start to its stop"),
        ("8:16:x1", "must go up"),
        ("8:16:x0", "must be at least 1"),
        ("8:16:+0", "must be at least 1"),
        ("1:100000000000:+1", "must list at most 10000 sizes"),
    ],
)
def test_sizes_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sizes(text)


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
        ({"operators": ["soft"]}, "attention_type soft is unknown; known: naive"),
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
