"""Plants one known mistake after the other and runs the tests that should fail: `make mutants`, or with names of some.

A mistake that no test notices says which test is missing. Each is planted in the source tree and taken back; a mistake
in C++ is compiled. A new one is an entry of MISTAKES: something that was wrong once, or that a change could break.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRACKER = "csrc/memory/tracking_allocator.cpp"
TRACKER_TESTS = ("tests/measure/test_tracker.py", "tests/measure/test_tracker_random.py")
RUN = "tests/bench/sweep/test_run.py"
OPERATORS = "tests/ops/test_all_operators.py"
ERRORS = "tests/ops/test_errors.py"


@dataclass(frozen=True)
class Mistake:
    """`right` occurs once in the file, and becomes `wrong`; the tests are pytest's words, of which one should fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


MISTAKES = [
    # A race, which may stay hidden on a busy machine.
    Mistake(
        "frees-race",
        TRACKER,
        "return total.fetch_sub(bytes) - bytes;",
        "const int64_t level = total.load() - bytes;\n  total.store(level);\n  return level;",
        (TRACKER_TESTS[0], "-k", "threads"),
    ),
    Mistake("refusal-stays", TRACKER, "  slot.refused_request = -1;\n", "", TRACKER_TESTS),
    Mistake(
        "inner-budget-stays",
        TRACKER,
        "  slot_ = kClosed;\n  update_ceiling();\n",
        "  slot_ = kClosed;\n",
        TRACKER_TESTS,
    ),
    Mistake(
        "linear-sums-of-one-segment",
        "csrc/linear_attention/linear_attention_cpu.h",
        "return shape.continued || segments(shape, length) > 1 ? ",
        "return shape.continued ? ",
        ("tests/ops/test_linear_attention.py", "-m", "not slow", "-k", "add_up"),
    ),
    Mistake(
        "products-of-one-chain",
        "csrc/common/tile_product.h",
        "constexpr int64_t kProductChain = 64;",
        "constexpr int64_t kProductChain = 1 << 20;",
        ("tests/ops/test_random_cases.py", "-k", "drift"),
    ),
    Mistake(
        "softplus-keeps-v-for-its-own-gradient",
        "csrc/softplus_attention/softplus_attention_autograd.cpp",
        "in.q.requires_grad() || in.k.requires_grad() || requires_gradient(in.state) || !in.v.is_contiguous();",
        "true;",
        (OPERATORS, "-k", "backward_reads and softplus"),
    ),
    Mistake(
        "an-error-names-no-argument",
        "memcheck/ops/checks.py",
        'raise TypeError(f"{op}: {name} must be {dtype_name(dtype)} to match',
        'raise TypeError(f"{op}: x must be {dtype_name(dtype)} to match',
        (ERRORS,),
    ),
    Mistake(
        "a-full-open-block",
        "memcheck/ops/compressed_attention_states.py",
        "if not 0 <= state.positions < factor:",
        "if not 0 <= state.positions <= factor:",
        (ERRORS,),
    ),
    Mistake(
        "shared-gradient-counts-twice",
        "memcheck/measure/run.py",
        "sum(appeared.values()))",
        "sum(gradients.values()) + sum(incoming.values()))",
        ("tests/measure/test_measurement.py", "-k", "view"),
    ),
    Mistake(
        "outputs-die-after-the-forward",
        "memcheck/core/outputs.py",
        "return Outputs(Left(output, loss), named, roots, start)",
        "return Outputs(Left(None, roots), named, roots, start)",
        ("tests/predict/test_outputs.py", "-k", "loop"),
    ),
    Mistake(
        "record-of-another-dtype",
        "memcheck/bench/sweep/run.py",
        'return digest([{**case.fields(), "device": None},',
        'return digest([{**case.fields(), "device": None, "dtype": None},',
        (RUN, "-k", "another_case"),
    ),
    Mistake(
        "record-of-another-mode",
        "memcheck/bench/sweep/run.py",
        'return digest([{**case.fields(), "device": None},',
        'return digest([{**case.fields(), "device": None, "mode": None},',
        (RUN, "-k", "another_case"),
    ),
    Mistake(
        "prediction-of-another-dtype",
        "memcheck/bench/sweep/predicted_sweep.py",
        '{**case.fields(), "device": None}',
        '{**case.fields(), "device": None, "dtype": None}',
        (RUN, "-k", "another_prediction"),
    ),
    Mistake(
        "one-search-only",
        "memcheck/predict/api.py",
        "low = self.edge(again)\n",
        "return self.found_at(again)\n",
        ("tests/cli/test_fit.py", "-k", "found"),
    ),
    Mistake(
        "flash-tile-at-192",
        "memcheck/simulated/facts/products.py",
        "64 if queries >= 192 else 32",
        "64 if queries > 192 else 32",
        ("tests/predict/test_cases.py", "-k", "flash"),
    ),
    Mistake(
        "compiler-remembers",
        "memcheck/bench/sweep/worker.py",
        "        forget_the_last_case()\n",
        "",
        (RUN, "-k", "compiled"),
    ),
]


def run(mistake: Mistake) -> bool:
    """Whether a test fails with the mistake."""
    path = ROOT / mistake.file
    text = path.read_text()
    assert text.count(mistake.right) == 1, mistake
    try:
        path.write_text(text.replace(mistake.right, mistake.wrong))
        compile_if_needed(path)
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mistake.tests]
        status = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True).returncode
    finally:
        path.write_text(text)
        compile_if_needed(path)
    if status not in (0, 1):
        sys.exit(f"{mistake.name}: pytest {' '.join(mistake.tests)} ended with {status}")
    return status == 1


def compile_if_needed(path: Path) -> None:
    if "csrc" in path.relative_to(ROOT).parts:
        environment = {**os.environ, "MEMCHECK_CUDA": "0"}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)


def main(names: list[str]) -> int:
    chosen = [mistake for mistake in MISTAKES if not names or mistake.name in names]
    survived = 0
    for mistake in chosen:
        noticed = run(mistake)
        survived += not noticed
        print(f"{mistake.name:<32} {'noticed' if noticed else 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mistakes were noticed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
