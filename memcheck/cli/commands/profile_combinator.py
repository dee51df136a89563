"""`memcheck profile-combinator`: memory and time of the combinator."""

from __future__ import annotations

from memcheck.bench import catalog, profile
from memcheck.cli.run_requests import ProfileCombinator
from memcheck.cli.running import run_cases


def run(request: ProfileCombinator) -> int:
    """Runs the cases from small to large, so that an early end loses only the largest."""
    device = profile.find_device(request.device)
    default = "combinator-low-memory" if request.low_memory else "combinator"
    cases = [
        catalog.make_combinator_case(
            name,
            bsz=request.bsz,
            query_len=query_len,
            dim=request.dim,
            dtype=request.dtype,
            mode=request.mode,
            compiled=request.compile,
            device=device,
        )
        for query_len in sorted(request.query_len or ([1] if request.mode == "decode" else [512]))
        for name in dict.fromkeys(request.combinator_type or [default])
    ]
    return run_cases(cases, request, title="Peak memory of the combinator")
