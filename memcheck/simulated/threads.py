"""The threads of DataParallel. One that begins takes the handle of cuBLAS, and its workspace, of one that has ended.

The simulated GPU has a workspace for each thread, so here the threads do not end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from memcheck.core.after_import import after_import

PARALLEL_APPLY = "torch.nn.parallel.parallel_apply"
_kept: dict[tuple[int, int], ThreadPoolExecutor] = {}  # By the thread that starts it, and the number of the replica.


class KeptThread:
    """In place of threading.Thread."""

    def __init__(self, target: Callable[..., object], args: Sequence[Any]) -> None:
        self._target, self._args = target, args
        self._done: Future[object] | None = None

    def start(self) -> None:
        key = threading.get_ident(), int(self._args[0])
        worker = _kept.setdefault(key, ThreadPoolExecutor(1))
        self._done = worker.submit(self._target, *self._args)

    def join(self) -> None:
        if self._done is not None:
            self._done.result()


def keep_threads() -> None:
    """Called before torch is imported."""

    def answer() -> None:
        module: Any = sys.modules[PARALLEL_APPLY]
        module.threading = SimpleNamespace(Thread=KeptThread, Lock=threading.Lock)

    after_import(PARALLEL_APPLY, answer)
