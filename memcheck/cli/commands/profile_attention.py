"""`memcheck profile-attention`: memory and time of attention operators."""

from __future__ import annotations

from typing import Any

from memcheck.bench import catalog, profile
from memcheck.bench.case import Case
from memcheck.cli import options, running
from memcheck.cli.cases import check_takes_window, gpu_words, lengths_of
from memcheck.cli.run_requests import ProfileAttention

DEFAULT_LENGTHS = [256, 512, 1024, 2048, 4096]


def run(request: ProfileAttention) -> int:
    cases = cases_of(request)
    given = {name for name in ("dtype", *options.GPU_SIZES) if getattr(request, name)}
    given |= {"seq_len"} if request.seq_len or request.query_len or request.kv_len else set()
    note = gpu_words(given) if cases[0].device != "cpu" else ""
    return running.run_cases(cases, request, title="Peak memory of attention", note=note)


def cases_of(request: ProfileAttention) -> list[Case]:
    """The cases of the flags, from small to large, so that an early end loses only the largest."""
    device = profile.find_device(request.device)
    on_gpu = device != "cpu"
    defaults: dict[str, Any] = {
        **(options.GPU_SIZES if on_gpu else options.DEFAULT_SIZES),
        "core_dim": None,
        "factor": None,
        "window": None,
    }
    sizes = {name: (getattr(request, name) or [default])[0] for name, default in defaults.items()}
    same: dict[str, Any] = {
        "dtype": request.dtype or (options.GPU_DTYPE if on_gpu else "float32"),
        "causal": request.causal is not False,
        "mode": request.mode,
        "compiled": request.compile,
        "device": device,
    }
    lengths = lengths_of(vars(request), options.GPU_LENGTHS if on_gpu else DEFAULT_LENGTHS)
    names = dict.fromkeys(request.attention_type or options.DEFAULT_TYPES)
    check_takes_window(request.window, names)
    return [catalog.make_case(name, query_len=S, kv_len=T, **sizes, **same) for S, T in lengths for name in names]
