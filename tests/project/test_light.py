"""Without the compiled extension: what works, what says that it needs it, and what other systems than Linux lack."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import memcheck
from memcheck._extension import MISSING
from memcheck.core.errors import ExtensionError, MemcheckError

# Where the extension is there, make ci leaves it out.
pytestmark = [] if MISSING else [pytest.mark.ci]

PACKAGE = Path(memcheck.__file__).parent
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_extension.py"]
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)

GPT = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, vocabulary=1000, dim=128, heads=4, layers=2, context=256):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def gpt():
    return Gpt(), torch.zeros(2, 256, dtype=torch.int64)


def ours():
    import memcheck

    return memcheck.nn.LinearSelfAttention(16, 2), torch.zeros(1, 4, 16)
"""


@pytest.fixture
def model(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_text(GPT)


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python without the extension, unless `environment` says otherwise."""
    variables = {"MEMCHECK_EXTENSION": "0", "MEMCHECK_PROBES": str(cwd / "probes.jsonl"), **environment}
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def in_python(code: str, cwd: Path, **environment: str) -> str:
    done = run("-c", textwrap.dedent(code), cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_at_the_top(path: Path) -> set[str]:
    """The names that a module imports when it is imported itself."""
    tops = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if not isinstance(node, DEFINITIONS)]
    parts = [part for top in tops for part in ast.walk(top) if isinstance(part, ast.Import | ast.ImportFrom)]
    return {name.name for part in parts for name in part.names}


def test_no_module_imports_the_extension_at_its_top() -> None:
    assert len(MODULES) > 100
    assert [path for path in MODULES if names_at_the_top(path) & {"_C", "memcheck._C"}] == []


def test_the_error_is_one_of_imports_and_of_commands() -> None:
    assert issubclass(ExtensionError, ImportError)
    assert issubclass(ExtensionError, MemcheckError)
    assert ExtensionError.exit_code == 1


# Where to import each module: not where it replaces modules of others, runs a command, or needs a package of others.
IMPORT_ALL = """
import importlib, pkgutil, sys
import memcheck

failed = []
for module in pkgutil.walk_packages(memcheck.__path__, "memcheck."):
    name = module.name
    compiled = ("._C", "._simulated", "._simulated_cpu", "._simulated_rules", "._allocator")
    if name.endswith(("__main__", *compiled)) or "search_path" in name or "integrations." in name:
        continue
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{name}: {error!r}")
assert not failed, failed
assert "memcheck._C" not in sys.modules
assert all(hasattr(memcheck, name) for name in memcheck.__all__)
"""


CODE = {
    "memcheck.softplus_attention(*[torch.ones(1, 2, 2)] * 3)": "memcheck.softplus_attention",
    "memcheck.nn.LinearSelfAttention(8, 2)(torch.ones(1, 2, 8))": "memcheck.linear_attention",
    "torch.ops.memcheck.combinator(torch.ones(2, 2), torch.ones(2, 2, 2))": "memcheck.combinator",
    "memcheck.decompositions()": "memcheck.decompositions",
    "memcheck.measure_memory(torch.nn.Linear(2, 2), torch.ones(1, 2))": "measuring memory on the CPU",
    "memcheck.track().__enter__()": "measuring memory on the CPU",
    "memcheck.predict_memory(torch.nn.Linear(2, 2), torch.ones(1, 2), probes='table')": "simulating the CPU",
    "memcheck.predict_memory(memcheck.linear_r, torch.ones(1, 2, 2), torch.ones(2, 2))": "simulating the CPU",
}


def test_what_needs_it_says_so_in_a_line(tmp_path: Path) -> None:
    said = in_python(
        f"""
        import json, memcheck, torch
        from pathlib import Path

        def said(code):
            try:
                eval(code)
            except ImportError as error:
                return str(error)

        print(json.dumps([said(code) for code in {[*CODE]}]))
        """,
        tmp_path,
    )
    for user, line in zip(CODE.values(), json.loads(said), strict=True):
        assert line.startswith(f"{user} needs memcheck's compiled extension, which is ")
        assert "; build it: pip install --no-build-isolation " in line
        assert "\n" not in line


COMMANDS = {
    "predict --attention-type softplus --device A10": "memcheck.softplus_attention",
    "predict --model gpt.py:ours --device A10": "memcheck.linear_attention",
    "profile-attention --seq-len 8 --device cpu": "measuring on the CPU",
    "profile-model --size tiny --device cpu": "measuring on the CPU",
    "sweep --seq-len 8 --attention-type naive --device cpu --output sweep": "measuring on the CPU",
    "run gpt.py": "measuring memory on the CPU",
    "gradcheck --device cpu": "memcheck.softplus_attention",
    "predict --model gpt.py:gpt --probes table.jsonl": "simulating the CPU",
}


@pytest.mark.usefixtures("model")
def test_commands_that_need_it_say_so_in_a_line(tmp_path: Path) -> None:
    code = f"import torch, memcheck.__main__\nprint([memcheck.__main__.main(words.split()) for words in {[*COMMANDS]}])"
    done = run("-c", code, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == str([1] * len(COMMANDS))
    for user, line in zip(COMMANDS.values(), done.stderr.splitlines(), strict=True):
        assert line.startswith(f"memcheck: {user} needs memcheck's compiled extension, which is ")


def test_info_says_what_is_missing(tmp_path: Path) -> None:
    facts = json.loads(run("-m", "memcheck", "info", "--format", "json", cwd=tmp_path).stdout)
    assert "; build it: pip install --no-build-isolation " in facts["build"]["extension"]
    assert facts["cpu"]["level"] is None
    assert facts["kernels"] == {}
