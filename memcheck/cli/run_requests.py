"""Requests of the commands that run cases. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from memcheck.cli.options import (
    COMBINATOR_TYPES,
    DECODER_TYPES,
    DEFAULT_SIZES,
    DEFAULT_TYPES,
    GPU_LENGTHS,
    GPU_SIZES,
    Detailed,
    Modes,
    OfTwoLengths,
    Plugins,
    Predicting,
    Timed,
    of_place,
    of_step,
    request,
)
from memcheck.core import converters
from memcheck.core.converters import count, names, switch
from memcheck.core.devices import DEVICES
from memcheck.core.errors import UsageError
from memcheck.core.options import named, option

PRESETS = ("quick", "memcheck-pyt", "cs336", "ato")
FOLDER = "folder of the results; records of the same cases are replaced, others stay; default: results"


@request()
class Cases(Timed, Detailed, Plugins, Modes):
    """The options of the commands that run operators case by case."""

    max_seconds_per_case: float | None = option(
        None,
        "no timed pass of a case begins after S seconds; 0: no limit; default: 60 on a CPU, else 0",
        converters.seconds,
    )
    compile: bool = option(False, "run under torch.compile, which compiles before the measurement", switch)
    predict: bool = option(False, "a predicted row under each measured one, and their ratio", switch)
    nvtx: bool = option(False, "mark passes with NVTX ranges, for Nsight Systems", switch)
    output: Path = option(Path("results"), FOLDER, converters.folder)
    units: bool = option(False, "bytes also in U, the bytes of one main tensor, and per query and key", switch)
    explain: int | None = option(
        None,
        "list the N (10) largest tensors alive at each peak and kept for backward, by what allocated them",
        converters.count_or_ten,
        nargs="?",
        const=10,
        metavar="N",
    )
    timeline: Path | None = option(
        None, "draw memory over time by what allocated it, as .png, .svg or .pdf; one file per case", converters.file
    )
    snapshot: Path | None = option(
        None, "write memory over time for the viewer at pytorch.org/memory_viz; one file per case", converters.file
    )
    trace: Path | None = option(
        None, "write torch.profiler's trace, and print which kernels took the time; one file per case", converters.file
    )


@request(
    **{
        name: {"more": f"default: {size}, on a GPU {GPU_SIZES[name]}", "metavar": "N"}
        for name, size in DEFAULT_SIZES.items()
    },
    core_dim={"metavar": "N"},
    factor={"metavar": "N"},
    window={"metavar": "N"},
    attention_type=f"repeatable; default: {','.join(DEFAULT_TYPES)}",
    seq_len=f"default: 256 to 4096, on a GPU {GPU_LENGTHS[0]} to {GPU_LENGTHS[-1]}",
    dtype="on a GPU bf16",
)
class ProfileAttention(Cases, OfTwoLengths):
    """Measures memory and time of attention operators: a table, records and a plot.

    memcheck profile-attention
    memcheck profile-attention --attention-type naive,softplus --seq-len 1024,2048 --dtype bf16 --memory-limit 100MiB
    memcheck profile-attention --attention-type naive --seq-len 1024 --explain --predict
    memcheck profile-attention --attention-type softmax,softplus --lengths 4096,1000,300
    """

    preset: str = option("quick", "values of flags not given; default: quick", choices=PRESETS[:1])

    def check(self) -> None:
        for name in (*DEFAULT_SIZES, "core_dim", "factor", "window"):
            self.single(name, "here, as memcheck sweep takes several")


@request()
class ProfileCombinator(Cases):
    """Measures memory and time of the combinator: a table, records and a plot.

    memcheck profile-combinator --bsz 64 --query-len 512 --dim 128
    memcheck profile-combinator --combinator-type combinator,combinator-low-memory --no-time
    """

    bsz: int = option(64, "batch size B; default: 64", count)
    dim: int = option(128, "token dimension E; default: 128", count)
    query_len: list[int] | None = option(None, "lengths S; default: 512, or 1 in --mode decode", converters.sizes)
    combinator_type: list[str] | None = option(
        None, f"{', '.join(COMBINATOR_TYPES)}; default: combinator; repeatable", names, repeatable=True
    )
    low_memory: bool = option(
        False, "combinator-low-memory: computes its pre-activations again, does not keep them", switch
    )
    dtype: str = option("float32", "fp32, bf16, fp16, fp64, or torch's names; default: fp32", converters.dtype_name)

    def check(self) -> None:
        if self.low_memory and self.combinator_type:
            both = f"{named('low_memory')} is {named('combinator_type')} combinator-low-memory"
            raise UsageError(f"{both}: leave out one of the two")


@request(
    device={"more": f"with --predict also {', '.join(DEVICES)}, or a size", "metavar": "NAME"},
    passes={"help": "timed passes; default: 10, or as many as fit into 10 s"},
)
class ProfileModel(Timed, Predicting, Detailed):
    """Measures and predicts memory and time of a whole decoder: parameters, gradients, AdamW and activations.

    memcheck profile-model --size small --attention-type naive,softplus
    memcheck profile-model --size xl --context 1024 --bsz 4 --checkpointing --predict --device A100-80GB
    memcheck profile-model --autocast bf16 --components --output results/model
    """

    size: list[str] = option(("tiny",), "tiny, mini, small, medium, large, xl, 2.7B, all; default: tiny", names)
    attention_type: list[str] = option(
        ("softmax",), f"{', '.join(DECODER_TYPES)}, all of them causal; default: softmax", names
    )
    feed_forward: list[str] = option(("swiglu",), "swiglu, combinator, combinator-low-memory; default: swiglu", names)
    mode: list[str] = option(
        ("train",),
        "forward: no gradients; backward: forward and backward; train: and a step of AdamW; default: train",
        names,
    )
    dtype: list[str] = option(
        ("float32",), "dtype of the parameters: fp32, bf16, fp16, fp64; default: fp32", converters.dtype_names
    )
    context: list[int] = option((128,), "lengths S; default: 128", converters.sizes)
    bsz: int = option(1, "batch size B; default: 1", count)
    factor: int | None = option(None, "positions per block of compressed attention; default: 8", count)
    window: int | None = option(
        None, "newest positions that compressed attention sees as they are; default: none of them", count
    )
    autocast: str | None = of_step(
        "autocast",
        help="compute products in bf16 (if no name is given) or fp16, with parameters in fp32",
        convert=converters.autocast_name,
        nargs="?",
        const="bf16",
        metavar="bf16|fp16",
    )
    checkpointing: bool = of_step("checkpointing", more="default: --no-checkpointing", negatable=True)
    compile: bool = option(False, "run under torch.compile; such cases are not predicted", switch)
    predict: bool = option(False, "predict only: run and allocate nothing", switch)
    components: bool = option(False, "a table of what each part keeps; printed for a single case anyway", switch)
    nvtx: bool = option(False, "mark passes and modules with NVTX ranges, for Nsight Systems", switch)
    torch_version: tuple[int, int] | None = of_place("torch_version", more="with --predict", metavar="2.13")
    snapshot: Path | None = option(
        None, "write memory over time for the viewer at pytorch.org/memory_viz; for a single case", converters.file
    )
    trace: Path | None = option(
        None, "write torch.profiler's trace, and print which kernels took the time; for a single case", converters.file
    )
    output: Path = option(Path("results"), FOLDER, converters.folder)

    def check(self) -> None:
        for name, words in (("device_from_this_gpu", f"takes {named('device')}"), ("torch_version", "has this torch")):
            if getattr(self, name) is not None and not self.predict:
                raise UsageError(f"{named(name)} is for {named('predict')}; a run {words}")


# Groups of a sweep's flags.
GRID, MEASURING, RUNNING, PREDICTING = "grid", "measuring", "running", "predicting"
OPTIONAL: dict[str, Any] = {"default": None, "only_on": True}


@request(
    **{
        name: {"group": GRID}
        for name in ("bsz", "dim", "heads", "seq_len", "query_len", "kv_len", "lengths", "packed", "padded")
    },
    **{name: {"group": GRID} for name in ("core_dim", "factor", "window", "causal")},
    attention_type={"more": f"also {', '.join(COMBINATOR_TYPES)}; repeatable", "group": GRID},
    dtype={"convert": converters.dtype_names, "more": "on a GPU bf16", "group": GRID},
    mode={"default": None, "convert": names, "choices": None, "metavar": "NAME[,NAME]", "group": GRID},
    device={"help": "cpu, cuda or cuda:1; default: cuda if there is a GPU; with --predict-only a GPU by name or size"},
    memory_limit={"help": "out of memory above this; units: B, KiB, MiB, GiB, KB, MB, GB", "group": MEASURING},
    passes={"group": MEASURING},
    no_time={**OPTIONAL, "group": MEASURING},
    plugin={"group": RUNNING},
    device_from_this_gpu={"group": PREDICTING},
)
class Sweep(OfTwoLengths, Timed, Predicting):
    """Runs a grid of cases, with tables and plots. The same command again continues where the last one stopped.

    memcheck sweep
    memcheck sweep --preset memcheck-pyt --memory-limit 40GiB --output results/memcheck-pyt
    memcheck sweep --attention-type naive,softplus --bsz 8 --seq-len 256:16384:x2 --dim 16,32,64,128 --dry-run
    memcheck sweep --attention-type softmax,softplus --lengths 2048,2048 --lengths 2048,512,512 --dim 128,256
    """

    groups: ClassVar[dict[str, str]] = {GRID: "every combination is a case; N: 8 or 16,32 or 256:16384:x2"}

    words: list[str] | None = None  # The command, as it was typed.
    # All defaults are None, so that what is given can be told from values of presets and TOML files.
    preset: str | None = option(None, "a known grid; default: quick, if no flag names a case", choices=PRESETS)
    config: Path | None = option(
        None, "flags as TOML keys; [[grid]] tables are added up", converters.file, metavar="FILE.toml"
    )
    compile: bool | None = option(None, "run under torch.compile", switch, group=GRID)
    max_seconds_per_case: float | None = option(
        None,
        "no timed pass of a case begins after S seconds; 0: no limit; default: 60 on a CPU, else 0; a case that takes "
        "longer is ended",
        converters.seconds,
        group=MEASURING,
    )
    isolate: bool | None = option(None, "a new process for each case", switch, only_on=True, group=RUNNING)
    retry: bool | None = option(
        None, "run rows again that ended as error, killed, timeout or skipped", switch, only_on=True, group=RUNNING
    )
    dry_run: bool | None = option(None, "list the cases, run none", switch, only_on=True, group=RUNNING)
    workers: int | None = option(None, "cases at the same time; default: 1", count, group=RUNNING)
    devices: list[str] | None = option(None, "CUDA devices, with a worker on each", names, metavar="0,1", group=RUNNING)
    dask: str | None = option(None, "a dask scheduler whose workers run the cases", metavar="ADDRESS", group=RUNNING)
    output: Path | None = option(None, "folder of the results; default: results", converters.folder, group=RUNNING)
    all_pictures: bool | None = option(
        None,
        "also each panel of an overview as a picture of its own, as memcheck plot draws them",
        switch,
        only_on=True,
        group=RUNNING,
    )
    format: str | None = option(None, "format of stdout; default: table", choices=("table", "json"), group=RUNNING)
    predict_only: bool | None = option(
        None, "run nothing: a predicted row for every case", switch, only_on=True, group=PREDICTING
    )
    predict: bool | None = option(
        None, "a predicted row beside every measured one", switch, only_on=True, group=PREDICTING
    )
