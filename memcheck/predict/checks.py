"""Conditions that only decide whether a program raises an error or warns, such as checks of arguments.

A prediction is of a program that runs, so it may assume that such a check passes.
"""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType

# Files between a condition and the mode that answers it.
MACHINERY = (
    "memcheck/predict/allocation_mode.py",
    "memcheck/predict/device_functions.py",
    "memcheck/predict/python_functions.py",
    "memcheck/predict/checks.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/_ops.py",
    "torch/overrides.py",
    "torch/utils/_python_dispatch.py",
)


def passing_value(frame: FrameType | None) -> bool | None:
    """The value with which the check that runs passes; None if what runs is no check."""
    while frame is not None and frame.f_code.co_filename.endswith(MACHINERY):
        frame = frame.f_back
    if frame is None:
        return None
    for at in positions_in(frame):
        for statement in statements_of(frame.f_code.co_filename):
            if contains(statement.test, at) and (passing := passing_test(statement)) is not None:
                return value_for(statement.test, at, passing)
    return None


def positions_in(frame: FrameType) -> list[tuple[int, int | None]]:
    """Lines and, from Python 3.11, columns of what a frame evaluates: an expression, or the jump after it."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return [(frame.f_lineno, None)]
    number = frame.f_lasti // 2
    found = list(positions())[max(number - 1, 0) : number + 1]
    return [(line, column) for line, _, column, _ in reversed(found) if line is not None]


@functools.lru_cache(maxsize=64)
def statements_of(filename: str) -> tuple[ast.If | ast.Assert, ...]:
    """The conditional statements of a file; none if it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert))


def contains(node: ast.expr, at: tuple[int, int | None]) -> bool:
    line, column = at
    end = node.end_lineno or node.lineno
    if not node.lineno <= line <= end or column is None:
        return node.lineno <= line <= end
    return (node.lineno, node.col_offset) <= (line, column) < (end, node.end_col_offset or 0)


def passing_test(statement: ast.If | ast.Assert) -> bool | None:
    """The value of the statement's test with which it neither raises nor warns; None if it does something else."""
    if isinstance(statement, ast.Assert):
        return True
    if complains(statement.body):
        return False
    return True if complains(statement.orelse) else None


def complains(body: list[ast.stmt]) -> bool:
    """Whether the statements end by raising an error, or are a single warning."""
    if not body:
        return False
    if isinstance(body[-1], ast.Raise):
        return True
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("warn", "warning")


def value_for(test: ast.expr, at: tuple[int, int | None], wanted: bool) -> bool:
    """The value of the part of the test at the position with which the test becomes as wanted."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return value_for(test.operand, at, not wanted)
    if isinstance(test, ast.BoolOp):
        parts = [part for part in test.values if contains(part, at)]
        return value_for(parts[0], at, wanted) if parts else wanted
    return wanted
