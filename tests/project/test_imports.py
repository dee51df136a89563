"""What `import memcheck` and the command line load. The layers of the packages are checked by `make lint`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memcheck
from memcheck.core.record import Record

HEAVY = ("matplotlib", "pandas", "scipy", "jinja2")
UPPER = ("memcheck.report", "memcheck.cli", "memcheck.notebook")
# Words that the command line answers by itself, and the exit code.
ANSWERED = {
    "": 0,
    "--help": 0,
    "--version": 0,
    "-V": 0,
    "predict --help": 0,
    "sing": 2,
    "predict --nope": 2,
    "predict --mode dream": 2,
    "predict --memory-limit 40": 2,
    "fit --bsz x": 2,
    "sweep --preset huge": 2,
    "profile_attention --seq_len 8,0": 2,
}


def run_python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own that has not imported torch."""
    command, env = [sys.executable, *words], {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def run_console(code: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", f"import json, sys\nfrom memcheck.__main__ import main\n{code}")


def loaded_by(code: str) -> list[str]:
    return json.loads(run_python("-c", f"import json, sys; {code}; print(json.dumps([*sys.modules]))").stdout)


def of_memcheck(loaded: list[str]) -> list[str]:
    return [name for name in loaded if name.split(".")[0] == "memcheck"]


def test_import_loads_no_torch() -> None:
    loaded = loaded_by("import memcheck; memcheck.Step, memcheck.Place, memcheck.Ranks, memcheck.__version__")
    assert not {"torch", "numpy", "tqdm", *HEAVY} & set(loaded)
    assert len(of_memcheck(loaded_by("import memcheck"))) <= 4


def test_torch_brings_the_operators_and_neither_reports_nor_plotting() -> None:
    loaded = loaded_by("import memcheck, torch; torch.ops.memcheck.combinator")
    assert [name for name in loaded if name in HEAVY or name.startswith(UPPER)] == []
    assert len(of_memcheck(loaded)) <= 18


def test_every_public_name_comes_when_it_is_used() -> None:
    assert {*memcheck.LATER, *memcheck.MODULES} == {*memcheck.__all__, "ops"}
    assert memcheck.combinator.__module__ == "memcheck.ops.combinator"
    assert memcheck.ops.combinator.combinator is memcheck.combinator
    with pytest.raises(AttributeError, match="module 'memcheck' has no attribute 'nothing'"):
        memcheck.nothing  # noqa: B018


REGISTERED = """
import sys, torch
from importlib.machinery import SourceFileLoader
assert torch.ops.memcheck.softplus_attention.default
x = torch.ones(1, 2, 2, dtype=torch.float64, requires_grad=True)
y, *_ = torch.ops.memcheck.softplus_attention(x, x, x)
(grad_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
assert torch.autograd.grad(grad_x.sum(), x)  # derivatives are registered in Python
assert type(torch.__loader__) is type(torch.__spec__.loader) is SourceFileLoader
assert not any(type(finder).__module__ == "memcheck.core.after_import" for finder in sys.meta_path)
"""
ORDERS = {
    "torch first": "import torch, memcheck",
    "torch later, in a thread": """
import importlib.util, threading, memcheck
importlib.reload(memcheck)
assert importlib.util.find_spec("torch")
thread = threading.Thread(target=exec, args=("from torch import nn",))
thread.start()
thread.join()
""",
    "a name of memcheck": "from memcheck import nn",
    "a module of memcheck": "import memcheck._extension",
}


@pytest.mark.extension
@pytest.mark.parametrize("order", ORDERS)
def test_operators_are_there_as_soon_as_torch_is(order: str) -> None:
    ended = run_python("-W", "error::UserWarning:memcheck", "-c", ORDERS[order] + REGISTERED)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.extension
def test_threads_import_memcheck_and_torch_at_once() -> None:
    code = """
import threading, memcheck

def of_torch():
    import torch
    assert torch.ops.memcheck.combinator.default

def of_memcheck():
    from memcheck import combinator, nn, track

threads = [threading.Thread(target=function) for function in (of_torch, of_memcheck) * 4]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    ended = run_python("-c", code + REGISTERED)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.extension
def test_a_broken_extension_fails_no_import_of_torch() -> None:
    code = """
import sys, memcheck
from importlib.machinery import ModuleSpec

class Broken:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "memcheck._C" else None

    def create_module(self, spec):
        raise ImportError("undefined symbol")

    def exec_module(self, module): ...

sys.meta_path.insert(0, Broken())
import torch
assert torch.ones(1).sum() == 1
try:
    memcheck.linear_r
except ImportError as error:
    print(error)
"""
    ended = run_python("-c", code)
    assert ended.stdout == "undefined symbol\n"
    assert ended.stderr == "memcheck's operators are not registered: undefined symbol\n"


def test_without_the_extension_operators_say_so() -> None:
    code = "import memcheck, torch; torch.ops.memcheck.linear_r(torch.ones(1, 2, 2), torch.ones(2, 2))"
    ended = run_python("-c", code, MEMCHECK_EXTENSION="0")
    said = ended.stderr.splitlines()[-1]
    assert "memcheck.linear_r needs memcheck's compiled extension, which is left out by MEMCHECK_EXTENSION=0" in said


@pytest.mark.extension
def test_a_program_of_the_operators_is_loaded_by_torch(tmp_path: Path) -> None:
    file = tmp_path / "program.pt2"
    made = f"""
import memcheck, torch
class Program(torch.nn.Module):
    def forward(self, x, w):
        return memcheck.linear_r(x, w)  # first used while it is traced
inputs = torch.ones(1, 2, 2), torch.ones(2, 2)
torch.export.save(torch.export.export(Program(), inputs), {str(file)!r})
"""
    loaded = f"""
import memcheck, torch
print(torch.export.load({str(file)!r}).module()(torch.ones(1, 2, 2), torch.ones(2, 2)).tolist())
"""
    assert run_python("-c", made).returncode == 0
    assert run_python("-c", loaded).stdout == "[[[2.0, 2.0], [2.0, 2.0]]]\n"


def test_an_integration_without_its_library_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import memcheck.integrations.transformers"
    ended = run_python("-c", code)
    assert "needs transformers, pip install transformers" in ended.stderr.splitlines()[-1]


def test_the_console_script_answers_without_torch() -> None:
    done = run_console(f"""
codes = []
for words in {list(ANSWERED)}:
    sys.argv = ["memcheck", *words.split()]
    codes.append(main())
print(json.dumps([codes, [*sys.modules]]))
""")
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    assert codes == list(ANSWERED.values())
    assert not {"torch", "numpy", "tqdm", *HEAVY} & set(loaded)
    assert len([name for name in loaded if name.split(".")[0] == "memcheck"]) <= 20


@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), (["fit", "--bsz", "x"], 2), (["compare", "results", "results"], 0)]
)
def test_no_import_of_torch_is_timed(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memcheck.write_record("results", Record(forward_peak_bytes=2**20), name="mine")
    ended = run_python("-X", "importtime", "-m", "memcheck", *words)
    assert ended.returncode == code
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
    assert "argparse" in loaded
    assert not {"torch", "numpy", *HEAVY} & loaded


def test_a_command_has_the_whole_package() -> None:
    done = run_console("""
sys.argv = ["memcheck", "info", "--format", "json"]
code = main()
import memcheck, torch
assert code == 0 and memcheck.nn and memcheck.measure_memory and torch.ops.memcheck.combinator
assert set(memcheck.__all__) <= set(dir(memcheck))
""")
    assert done.returncode == 0, done.stderr
    assert "memcheck::combinator" in json.loads(done.stdout)["kernels"]


def test_a_command_that_needs_the_extension_under_another_torch_ends_in_a_line() -> None:
    done = run_python(
        "-c",
        """
import sys, torch
torch.__version__ = "1.2.3"
from memcheck.__main__ import main
sys.exit(main(["predict", "--attention-type", "linear", "--device", "cpu"]))
""",
    )
    assert done.returncode == 1
    assert ", which is built against torch " in done.stderr
    assert done.stderr.startswith("memcheck: ")
    assert done.stderr.count("\n") == 1
