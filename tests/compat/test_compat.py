"""Unchanged client code of the closed bluewalm module runs: scripts in tests/compat, each in its own process."""

from __future__ import annotations

import copy
import importlib
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_python
from torch import Tensor

import memcheck
from memcheck import compat, nn
from memcheck.compat.__main__ import main
from memcheck.ops.combinator import combinator

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "compat"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_compat(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run_python("-W", "ignore", "-m", "memcheck.compat", *words, cwd=cwd, env=ENVIRONMENT, timeout=120)


def output_of(*words: str | Path) -> str:
    done = run_compat(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- stacks


@pytest.mark.parametrize("stack", ["gpt2_like", "llama_like"])
def test_a_stack_trains_and_decodes(stack: str) -> None:
    """Decoding in float32 has at most twice the error of a full forward in float32; no formula bounds a whole stack."""
    report = json.loads(output_of(SCRIPTS / f"{stack}.py", "20"))
    assert report["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    losses = report["losses"]
    assert sum(losses[-5:]) < sum(losses[:5]) / 2
    errors = report["errors"]
    assert errors["decoded, float64"] < 1e-10
    assert errors["traced and decoded, float64"] < 1e-10
    assert errors["decoded, float32"] <= 2 * errors["full, float32"]
    assert report["bfloat16 is finite"]
    assert "(combinator): Combinator(dim=32, precision=fp32, size=0.0078 MB)" in report["printed"]


def test_gradients_of_every_name() -> None:
    printed = output_of(SCRIPTS / "gradients.py").splitlines()
    assert len(printed) == 5
    assert all(line.endswith(" True") for line in printed)


def test_processes_started_by_multiprocessing() -> None:
    """Each process imports the script again and gets a module by pickle."""
    assert output_of(SCRIPTS / "spawned.py", "word") == "bluewalm (2, 8, 8) True\ndone\n"


# ---- python -m memcheck.compat


def test_a_script_runs_as_python_runs_it() -> None:
    done = run_compat("tests/compat/surroundings.py", "3", "--help", "-m")
    assert done.returncode == 3, done.stderr
    seen = json.loads(done.stdout)
    assert seen["name"] == "__main__"
    assert seen["argv"] == ["tests/compat/surroundings.py", "3", "--help", "-m"]
    assert seen["file"] == str(SCRIPTS / "surroundings.py")
    assert seen["path"] == str(SCRIPTS)
    assert seen["main"]
    bluewalm = ROOT / "memcheck" / "compat" / "search_path" / "bluewalm" / "__init__.py"
    assert seen["child"] == f"bluewalm_extension.linear_operator_l {bluewalm}\n"


def test_a_module_runs_as_python_runs_it() -> None:
    done = run_compat("-m", "surroundings", "4", cwd=SCRIPTS)
    assert done.returncode == 4, done.stderr
    seen = json.loads(done.stdout)
    assert seen["name"] == "__main__"
    assert seen["argv"] == [str(SCRIPTS / "surroundings.py"), "4"]


def test_a_module_of_a_package_that_imports_bluewalm(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from bluewalm.softplus_attention import Combinator\n")
    (tmp_path / "package" / "module.py").write_text(
        "from package import Combinator; print(__name__, Combinator(8).dim)"
    )
    done = run_compat("-m", "package.module", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "__main__ 8\n"), done.stderr


def test_a_script_has_its_own_future_statements(tmp_path: Path) -> None:
    """Annotations are evaluated unless the script itself imports annotations from __future__."""
    script = "def f(x: int) -> None: ...\nprint(f.__annotations__['x'] is int)"
    for future, real in (("", True), ("from __future__ import annotations\n", False)):
        (tmp_path / "script.py").write_text(future + script)
        assert output_of(tmp_path / "script.py") == f"{real}\n"


def test_a_traceback_points_into_the_script() -> None:
    done = run_compat(SCRIPTS / "surroundings.py", "raise")
    assert done.returncode == 1
    line = (SCRIPTS / "surroundings.py").read_text().splitlines().index('        raise RuntimeError("as asked")') + 1
    assert f'File "{SCRIPTS / "surroundings.py"}", line {line}, in <module>' in done.stderr
    assert done.stderr.endswith("RuntimeError: as asked\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "got nothing"),
        (["-m"], "got nothing"),
        (["--fast", "script.py"], "got --fast"),
        (["no/such.py"], "there is no script 'no/such.py'"),
        (["-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["-m", "no_such_package.module"], "there is no module 'no_such_package.module'"),
    ],
)
def test_a_usage_error_is_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["memcheck.compat", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("memcheck: ")
    assert said in printed.err
    assert "--help" in printed.err
    assert printed.err.count("\n") == 1


def test_a_usage_error_is_an_exit_code() -> None:
    done = run_compat("no/such.py")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_help() -> None:
    assert output_of("--help").startswith("usage: python -m memcheck.compat SCRIPT")


def test_another_bluewalm_is_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import bluewalm.softplus_attention as sa; print(sa.__file__)")
    (tmp_path / "bluewalm").mkdir()
    assert str(ROOT) in output_of(tmp_path / "script.py")  # a folder without __init__.py does not count
    (tmp_path / "bluewalm" / "__init__.py").write_text("")
    done = run_compat(tmp_path / "script.py")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("memcheck: compat: another bluewalm is there, " + str(tmp_path / "bluewalm"))
    assert done.stderr.count("\n") == 1


# ---- memcheck.compat.install()


@pytest.mark.isolated
def test_names_after_installing_twice() -> None:
    assert compat.install() != []
    assert compat.install() == []
    import bluewalm
    import bluewalm.softplus_attention as sa
    from bluewalm.softplus_attention import Combinator, attention_operator, heuristic_core_dim

    assert bluewalm.softplus_attention is sa is sys.modules["bluewalm.softplus_attention"]
    assert (Combinator, attention_operator) == (sa.Combinator, sa.attention_operator)
    assert issubclass(Combinator, nn.Combinator)
    assert importlib.import_module("bluewalm") is bluewalm
    assert [heuristic_core_dim(dim) for dim in (8, 64, 128, 768)] == [8, 104, 424, 3648]
    for name in ("QueryProjection", "KeyProjection", "ValueProjection", "OutProjection"):
        assert issubclass(getattr(sa, name), getattr(nn, name))


@pytest.mark.isolated
def test_operators_of_the_extension() -> None:
    """Operators have memcheck's values, pass opcheck, and compile with fullgraph."""
    compat.install()
    x, w, w_2 = torch.randn(2, 3, 8), torch.randn(8, 4), torch.randn(2, 8, 8)
    cases = {
        "linear_operator_r": ((w, x, 8, 4), memcheck.linear_r(x, w)),
        "linear_operator_l": ((w, x, 8, 4), memcheck.linear_l(x, w)),
        "combinator_operator": ((w_2, x, 8, True), combinator(x, w_2, low_memory=True)),
    }
    for name, (arguments, expected) in cases.items():
        check_operator(name, arguments, expected)


def check_operator(name: str, arguments: tuple[Any, ...], expected: Tensor) -> None:
    operator = getattr(torch.ops.bluewalm_extension, name)
    w, x, dim, last = arguments
    assert torch.equal(operator(*arguments), expected)
    for wanted in (True, False):
        leaves = [tensor.detach().requires_grad_(wanted) for tensor in (w, x)]
        torch.library.opcheck(operator.default, (*leaves, dim, last))
    compiled = torch.compile(lambda w, x: operator(w, x, dim, last), fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(w, x), expected)
    with pytest.raises(ValueError, match=rf"^{name}: w must be .*, got \({','.join(map(str, w.shape))}\)$"):
        operator(w, x, 16, last)


# ---- modules


def modules() -> list[torch.nn.Module]:
    sa = importlib.import_module("memcheck.compat.softplus_attention")
    names = ("QueryProjection", "KeyProjection", "ValueProjection", "OutProjection")
    return [*(getattr(sa, name)(8, core_dim=4, device="cpu") for name in names), sa.Combinator(dim=8, device="cpu")]


@pytest.mark.parametrize("module", modules(), ids=lambda module: type(module).__name__)
def test_a_module_is_copied_saved_and_moved(module: torch.nn.Module) -> None:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)]
    assert all(torch.equal(other.weight, module.weight) and str(other) == str(module) for other in copies)
    half = copies[0].to(torch.bfloat16)
    assert str(half).startswith(type(module).__name__ + "(dim=8, ")
    assert ", precision=bf16, " in str(half)


def test_the_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are made on the current CUDA device if there is one; a named or default device has precedence."""
    sa = importlib.import_module("memcheck.compat.softplus_attention")
    with torch.device("meta"):
        assert sa.KeyProjection(8, 4).weight.device.type == "meta"
    seen = []
    monkeypatch.setattr(nn.layers.Weighted, "__init__", lambda self, *shape, device, dtype: seen.append(device))
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        sa.Combinator(8)
        sa.OutProjection(8, 4, "cpu", torch.float64)
    assert seen == [None, "cpu", torch.device("cuda", 3), "cpu"]
