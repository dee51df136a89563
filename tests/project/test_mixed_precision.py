"""The notebook about mixed precision: its sums are those of independent arithmetic, and the page says its numbers."""

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BITS = {"fp32": 24, "fp16": 11, "bf16": 8}


def shown() -> str:
    """The texts of all outputs, as committed."""
    cells = json.loads((ROOT / "notebooks/7_mixed_precision.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "\n".join("".join(output.get("data", {}).get("text/plain", ())) for output in outputs)


def rounded(x: float, dtype: str) -> float:
    """x rounded to the dtype, to nearest with ties to even; for normal numbers."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, BITS[dtype])), exponent - BITS[dtype])


@pytest.mark.parametrize(("of_sum", "of_x"), [*zip(BITS, BITS, strict=True), ("fp32", "fp16"), ("fp32", "bf16")])
def test_every_addition_is_correctly_rounded(of_sum: str, of_x: str) -> None:
    """In float64 s + x is exact here."""
    cells = [re.split(r"  +", row)[1:] for row in shown().splitlines() if row.startswith(f"s in {of_sum}, x in {of_x}")]
    found = [float(number) for row in cells for number in row if re.fullmatch(r"\d+\.\d+", number)]
    expected = []
    for value, steps in ((0.01, 1000), (0.001, 10_000)):
        x, s = rounded(value, of_x), 0.0
        for _ in range(steps):
            s = rounded(s + x, of_sum)
        expected.append(pytest.approx(s, abs=1e-6))
    assert found == expected


def test_the_page_says_numbers_of_the_notebook() -> None:
    page = (ROOT / "docs/mixed-precision.md").read_text().partition("- **")[2]
    numbers = {word.replace(",", "") for word in re.findall(r"\b\d+[\d,]*\.?\d*(?:e-\d+)?\b", page.partition("![")[0])}
    outputs = shown().replace(",", "")
    # Of dtypes and releases, what is added, what follows from the format, and the sum of the copies: 6144 + 640.
    known = {"16", "32", "2.11", "2.13", "0.001", "10000", "0.01", "1000", "6e-8", "1e-8", "1", "6784"}
    assert sorted(number for number in numbers - known if number not in outputs) == []
    assert "6144" in outputs
    assert " 640" in outputs
