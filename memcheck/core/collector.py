"""Keeps Python's garbage collector at rest while any thread measures or predicts."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Users:
    """How many blocks need the collector at rest, and whether it was enabled before the first of them."""

    lock = threading.Lock()
    count = 0
    enabled = False


@contextmanager
def collector_at_rest(generation: int = 2) -> Iterator[None]:
    """Inside, the garbage collector is disabled, so that figures do not depend on when it runs.

    Blocks of several threads may overlap. The first one collects up to the generation, and the end of the last one
    restores what the first one found. Objects made meanwhile stay in the first two generations.
    """
    with Users.lock:
        is_first = Users.count == 0
        if is_first:
            Users.enabled = gc.isenabled()
        Users.count += 1
        gc.disable()
    try:
        if is_first:
            gc.collect(generation)
        yield
    finally:
        with Users.lock:
            Users.count -= 1
            if Users.count == 0 and Users.enabled:
                gc.enable()
