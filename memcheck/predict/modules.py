"""Which module of a model runs, and which one made a node of autograd's graph."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Modules:
    """Follows the modules of a forward. Nodes of the graph are known by their sequence numbers, which only grow."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Inside, forwards of the model's modules are followed."""
        with ExitStack() as stack:
            for path, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
                before = module.register_forward_pre_hook(lambda *_, path=path: self._begin(path))
                after = module.register_forward_hook(lambda *_: self._end(), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def path_of(self, node: Any) -> str:
        """The path of the module that runs, else of the one that made the node that runs; "" if there is none."""
        if self._open:
            return self._open[-1]
        if node is None or not self._numbers:
            return ""
        position = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._paths[position] if position >= 0 else ""

    def _begin(self, path: str) -> None:
        self._open.append(path)
        self._note()

    def _end(self) -> None:
        self._open.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._paths.append(self._open[-1] if self._open else "")
