"""Programs whose memory real GPUs printed print it on the simulated one, or differ as scripts.csv explains."""

import ast
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # It is no part of the installed package.

from published import printed  # noqa: E402

ROWS = printed.table()
COMMANDS = [*dict.fromkeys(printed.command_of(row) for row in ROWS)]
# A few seconds each. The others run in CI.
QUICK = (
    "bert_training.py",
    "workspace.py",
    "expanded_product.py",
    "small_modules.py",
    "kv_cache.py P03c.swa",
    "vision_transformer.py P01.07b",
)


def marks(program):
    return () if program.startswith(QUICK) else (pytest.mark.ci,)


@pytest.mark.parametrize(
    ("device", "program"), [pytest.param(*command, marks=marks(command[1])) for command in COMMANDS]
)
def test_figures_are_those_of_the_table(device, program):
    if program.startswith("flux"):
        pytest.importorskip("diffusers")
    figures = printed.figures_of(device, program)
    for row in ROWS:
        if printed.command_of(row) == (device, program):
            found = printed.difference(figures[row["id"]], row["printed"], row["unit"])
            assert found == row["difference"], (row["id"], figures[row["id"]], row["cause"])


def test_every_difference_has_a_cause():
    assert [row["id"] for row in ROWS if not printed.is_equal(row) and not row["cause"]] == []


def test_every_program_says_whose_it_is_and_prints_a_figure():
    named = {row["program"].split()[0] for row in ROWS}
    shared = {"gpt.py"}
    assert {path.name for path in printed.PROGRAMS.glob("*.py")} == named | shared
    for name in sorted(named):
        assert "github.com/" in (ast.get_docstring(ast.parse((printed.PROGRAMS / name).read_text())) or ""), name


def test_a_difference_has_the_decimals_of_the_printed_figure():
    assert printed.difference(str(2**20), "1.00", "MiB") == "0.00"
    assert printed.difference(str(3 * 2**19), "1.2", "MiB") == "0.3"
    assert printed.difference("512", "0", "B") == "512"
    assert printed.difference("OOM", "OOM", "GB") == "0"
    assert printed.difference("512", "OOM", "GB") == "512, not OOM"


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        printed.main(["P99"])
    assert "no figure begins with P99" in capsys.readouterr().err


def test_without_words_the_stored_figures_are_shown(capsys):
    assert printed.main([]) == 0
    equal = sum(map(printed.is_equal, ROWS))
    assert f"{equal} of {len(ROWS)} figures are equal as printed" in capsys.readouterr().out
