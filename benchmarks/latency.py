"""What a call costs apart from arithmetic: one position, against an operator that does nothing.

    python benchmarks/latency.py [--operators linear_attention linear_r] [--rounds 41] [--output FILE]

One run, B1 S1, fp32, without gradients. The operator that does nothing has the same schema, gets the same arguments and
is registered for the same dispatch keys. It allocates its results, which such an operator cannot avoid, and is compiled
when the benchmark starts. The ms are those of 1,000 calls, so they are microseconds per call. Contenders take turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from harness import Run, compare, print_rows, time_rounds, write_result
from torch.utils import cpp_extension

import memcheck

CALLS = 1000
NAMESPACE = "memcheck_empty"
OPERATORS = (
    "softplus_attention",
    "softplus_attention_step",
    "linear_attention",
    "linear_attention_step",
    "compressed_attention",
    "compressed_attention_step",
    "combinator",
    "linear_r",
    "linear_l",
)

# A result has the sizes of the first argument; of the argument x, if its name is new_x; or no elements.
SOURCE = """
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <string>

static void allocate_results(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t arguments = schema.arguments().size(), results = schema.returns().size();
  const auto tensor = [&](size_t i) -> const at::Tensor& { return (stack->end() - arguments + i)->toTensor(); };
  std::array<at::Tensor, 5> empty;
  for (size_t i = 0; i < results; ++i) {
    const std::string& name = schema.returns()[i].name();
    const bool is_state = name.rfind("new_", 0) == 0;
    const size_t like = is_state ? *schema.argumentIndexWithName(name.substr(4)) : 0;
    const bool has_elements = i == 0 || is_state;
    empty[i] = at::empty(has_elements ? tensor(like).sizes() : c10::IntArrayRef({0}), tensor(0).options());
  }
  torch::jit::drop(*stack, arguments);
  for (size_t i = 0; i < results; ++i) stack->emplace_back(std::move(empty[i]));
}
"""


def define_empty_operators() -> None:
    """Operators of the same names and schemas as memcheck's, in a namespace of their own."""
    schemas, kernels, autograd = "", "", ""
    for name in OPERATORS:
        schema = str(getattr(torch.ops.memcheck, name).default._schema).removeprefix("memcheck::")
        schemas += f'm.def(R"schema({schema})schema");\n'
        kernels += f'm.impl("{name}", torch::CppFunction::makeFromBoxedFunction<&allocate_results>());\n'
        autograd += f'm.impl("{name}", torch::CppFunction::makeFallthrough());\n'
    source = f"""{SOURCE}
TORCH_LIBRARY({NAMESPACE}, m) {{ {schemas} }}
TORCH_LIBRARY_IMPL({NAMESPACE}, CPU, m) {{ {kernels} }}
TORCH_LIBRARY_IMPL({NAMESPACE}, Autograd, m) {{ {autograd} }}
"""
    cpp_extension.load_inline(NAMESPACE, source, extra_cflags=["-O3"], is_python_module=False)


def cases() -> dict[str, tuple[Run, Run]]:
    """For each function, a call of it and of the operator that does nothing."""
    empty = getattr(torch.ops, NAMESPACE)
    channels = [torch.randn(1, 1, 64), torch.randn(1, 64, 1), torch.randn(1, 64, 1)]
    sums = [torch.randn(1, 64).exp() for _ in range(2)]
    heads = [torch.randn(1, 4, 1, 32) for _ in range(3)]
    blocks = [torch.randn(1, 4, 1, 32), *(torch.randn(1, 4, 8, 32) for _ in range(2))]
    state = [torch.randn(1, 4, 32, 32).exp(), torch.randn(1, 4, 32).exp()]
    prompt = memcheck.compressed_attention_state(*blocks[1:], factor=8)
    x, w, pair = torch.randn(1, 1, 64), torch.randn(64, 64), torch.randn(2, 64, 64)
    return {
        "softplus_attention": (
            lambda: memcheck.softplus_attention(*channels),
            lambda: empty.softplus_attention(*channels),
        ),
        "softplus_attention_step": (
            lambda: memcheck.softplus_attention_step(*channels, sums),
            lambda: empty.softplus_attention_step(*channels, *sums),
        ),
        "linear_attention": (
            lambda: memcheck.linear_attention(*heads, causal=True),
            lambda: empty.linear_attention(*heads, causal=True),
        ),
        "linear_attention_step": (
            lambda: memcheck.linear_attention_step(*heads, state),
            lambda: empty.linear_attention_step(*heads, *state),
        ),
        "compressed_attention": (
            lambda: memcheck.compressed_attention(*blocks, factor=8),
            lambda: empty.compressed_attention(*blocks, factor=8),
        ),
        "compressed_attention_step": (
            lambda: memcheck.compressed_attention_step(*heads, prompt, factor=8),
            lambda: empty.compressed_attention_step(*heads, *prompt[:5], factor=8),
        ),
        "combinator": (lambda: memcheck.combinator(x, pair), lambda: empty.combinator(x, pair)),
        "linear_r": (lambda: memcheck.linear_r(x, w), lambda: empty.linear_r(x, w)),
        "linear_l": (lambda: memcheck.linear_l(x, w), lambda: empty.linear_l(x, w)),
    }


def repeated(call: Run) -> Run:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    define_empty_operators()
    rows = []
    with torch.no_grad():
        for operator, (ours, empty) in cases().items():
            if args.operators and operator not in args.operators:
                continue
            times = time_rounds({"empty operator": repeated(empty), "memcheck": repeated(ours)}, args.rounds)
            rows += compare(times, "empty operator", operator=operator, B=1, S=1)
    print_rows(rows, "operator")
    print(write_result("latency", rows, args.output))


if __name__ == "__main__":
    main()
