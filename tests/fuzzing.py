"""How many random cases the tests make: 2,000, always the same; with MEMCHECK_FUZZ_CASES=N another N in every run."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("MEMCHECK_FUZZ_CASES", "0"))


def cases(share: int) -> Any:
    """Returns hypothesis' settings for a test that makes `share` of 2,000 cases.

    A failing case is made as small as possible and printed; the test keeps it as an @example.
    """
    unwanted = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=max(1, CASES * share // 2000) if CASES else share,
        derandomize=not CASES,
        database=None,
        deadline=None,
        suppress_health_check=unwanted,
    )
