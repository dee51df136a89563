"""CUDA graphs and memory pools of a simulated GPU."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

_numbers = itertools.count(1)


class CudaGraph:
    """torch._C._CUDAGraph. A replay does nothing: what the capture allocated stays where it is."""

    def __new__(cls, keep_graph: bool = False) -> CudaGraph:
        return super().__new__(cls)

    def capture_begin(self, *_: Any, **__: Any) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None: ...


def answers_of_graphs(c: ModuleType) -> dict[str, Any]:
    return {
        "_CUDAGraph": CudaGraph,
        "_graph_pool_handle": lambda: (0, next(_numbers)),
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }
