"""Runs an operator under torch.compile, and finds the implementation that the generated code calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from memcheck.core.errors import UnsupportedError
from memcheck.measure.sdpa_backend import fused_backend

T = TypeVar("T")


def compiled(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, compiled at its first call for the shapes of that call."""
    compiled: Callable[..., Any] = torch.compile(operator, dynamic=False)
    return compiled


def with_generated_code(run: Callable[[], T]) -> tuple[T, list[str]]:
    """The result of `run`, and the code that torch.compile generates meanwhile. Earlier compilations are discarded.

    UnsupportedError, in torch's words: this machine has no compiler that torch.compile can use.
    """
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
    from torch._inductor.utils import run_and_get_code

    try:
        # run_and_get_code resets torch._dynamo first, so that cases do not share compiled code.
        return run_and_get_code(run)
    except (InductorError, CppCompileError, InvalidCxxCompiler) as error:
        raise UnsupportedError(f"torch.compile: {str(error).strip().partition(chr(10))[0]}") from None


def backend_in_code(sources: list[str], device: str) -> tuple[str, str | None]:
    """The implementation that a compiled operator runs, and the reason if it is an unexpected one.

    Inductor recognises plain softmax attention, and may replace it by a fused attention.
    """
    code = "\n".join(sources)
    if not code:
        return "eager", "torch.compile generated no code for it"
    if fused := fused_backend(code):
        return fused, "torch.compile put F.scaled_dot_product_attention's fused attention in place of its lines"
    if "torch.ops.memcheck." in code:
        return f"memcheck {device}", None
    return "inductor", None
