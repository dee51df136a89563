"""What `import memcheck` and the command line load. The layers of the packages are checked by `make lint`."""

import json
import subprocess
import sys

import pytest

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


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)


def run_console(code: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", f"import json, sys, memcheck_console\n{code}")


def test_import_loads_no_report_and_no_plotting() -> None:
    code = "import json, sys, memcheck, torch; torch.ops.memcheck.combinator; print(json.dumps([*sys.modules]))"
    loaded = json.loads(run_python("-c", code).stdout)
    assert [name for name in loaded if name in HEAVY or name.startswith(UPPER)] == []
    assert len([name for name in loaded if name.split(".")[0] == "memcheck"]) <= 42


def test_an_integration_without_its_library_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import memcheck.integrations.transformers"
    ended = run_python("-c", code)
    assert "needs transformers, pip install transformers" in ended.stderr.splitlines()[-1]


def test_the_console_script_answers_without_torch() -> None:
    done = run_console(f"""
codes = []
for words in {list(ANSWERED)}:
    sys.argv = ["memcheck", *words.split()]
    codes.append(memcheck_console.main())
print(json.dumps([codes, [*sys.modules]]))
""")
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    assert codes == list(ANSWERED.values())
    assert not {"torch", "numpy", "tqdm", *HEAVY} & set(loaded)
    assert len([name for name in loaded if name.split(".")[0] == "memcheck"]) <= 19


@pytest.mark.parametrize("words", [["--help"], ["fit", "--bsz", "x"]])
def test_no_import_of_torch_is_timed(words: list[str]) -> None:
    code = f"import sys, memcheck_console; sys.argv = ['memcheck', *{words}]; sys.exit(memcheck_console.main())"
    ended = run_python("-X", "importtime", "-c", code)
    assert ended.returncode == (0 if words == ["--help"] else 2)
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
    assert "argparse" in loaded
    assert not {"torch", "numpy", *HEAVY} & loaded


def test_a_command_has_the_whole_package() -> None:
    done = run_console("""
sys.argv = ["memcheck", "info", "--format", "json"]
code = memcheck_console.main()
import memcheck, torch
assert code == 0 and memcheck.nn and memcheck.measure_memory and torch.ops.memcheck.combinator
assert set(memcheck.__all__) <= set(dir(memcheck))
""")
    assert done.returncode == 0, done.stderr
    assert "memcheck::combinator" in json.loads(done.stdout)["kernels"]


def test_a_command_that_needs_the_extension_under_another_torch_ends_in_a_line() -> None:
    done = run_console("""
import torch
torch.__version__ = "1.2.3"
sys.argv = ["memcheck", "predict", "--attention-type", "linear", "--device", "T4"]
sys.exit(memcheck_console.main())
""")
    assert done.returncode == 1
    assert ", which is built against torch " in done.stderr
    assert done.stderr.startswith("memcheck: ")
    assert done.stderr.count("\n") == 1
