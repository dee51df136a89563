"""Requests of the commands that run cases. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path

from memcheck.cli import options
from memcheck.cli.options import Request
from memcheck.core import converters
from memcheck.core.converters import count, names, switch
from memcheck.core.errors import UsageError
from memcheck.core.options import Option, flags_of, named, option
from memcheck.core.step import Place, Step

PRESETS = ("quick", "memcheck-pyt", "cs336", "ato")


# Records are written to a folder.
OUTPUT = {
    "output": Option(Path("results"), "folder of the results; records of other cases stay there", converters.folder)
}
# Commands that may look into their cases.
INSPECTING = {
    "nvtx": Option(False, "mark passes and modules with NVTX ranges, for Nsight Systems", switch),
    "snapshot": Option(
        None,
        "write memory over time for the viewer at pytorch.org/memory_viz; a file per case, of profile-model for one",
        converters.file,
    ),
    "trace": Option(
        None,
        "write torch.profiler's trace, and print which kernels took the time; a file per case, of profile-model one",
        converters.file,
    ),
}
# Cases of operators that are run.
RUNS = (
    *(options.COMPILE, options.MODE, options.PLUGIN, options.MEASURED, options.TIMED),
    {
        "max_seconds_per_case": Option(
            None,
            "no timed pass of a case begins after S seconds, and a sweep ends a case that takes longer; 0: no limit; "
            "default: 60 on a CPU, else 0",
            converters.seconds,
            group=options.MEASURING,
        ),
        "predict": Option(False, "a predicted row for each measured one", switch),
    },
)
# Cases of operators that are run one by one, in this process.
CASE_BY_CASE = (
    *(options.DOUBTS, options.FORMAT, OUTPUT, INSPECTING, *RUNS),
    {
        "units": Option(False, "bytes also in U, the bytes of one main tensor, and per query and key", switch),
        "explain": Option(
            None,
            "list the N (10) largest tensors alive at each peak and kept for backward, by what allocated them",
            converters.count_or_ten,
            const=10,
            metavar="N",
        ),
        "timeline": Option(
            None,
            "draw memory over time by what allocated it, as .png, .svg or .pdf; one file per case",
            converters.file,
        ),
    },
)


class ProfileAttention(Request):
    """Measures memory and time of attention operators: a table, records and a plot.

    memcheck profile-attention
    memcheck profile-attention --attention-type naive,softplus --seq-len 1024,2048 --dtype bf16 --memory-limit 100MiB
    memcheck profile-attention --attention-type naive --seq-len 1024 --explain --predict
    """

    takes = (*CASE_BY_CASE, options.SIZES, options.OF_OPERATORS, options.TWO_LENGTHS)
    first = ("attention_type", "device", "bsz", "seq_len", "dim", "heads", "mode", "dtype", "output")
    ones = (*options.DEFAULT_SIZES, "core_dim", "factor", "window")

    preset: str = option("quick", "values of flags not given", choices=PRESETS[:1])


class ProfileCombinator(Request):
    """Measures memory and time of the combinator: a table, records and a plot.

    memcheck profile-combinator --query-len 512 --dim 128
    memcheck profile-combinator --combinator-type combinator,combinator-low-memory --no-time
    """

    takes = CASE_BY_CASE

    bsz: int = option(64, "batch size B", count)
    dim: int = option(128, "token dimension E", count)
    query_len: list[int] | None = option(None, "lengths S; default: 512, or 1 in --mode decode", converters.sizes)
    combinator_type: list[str] | None = option(
        None, f"{', '.join(options.COMBINATOR_TYPES)}; default: combinator", names, repeatable=True
    )
    low_memory: bool = option(
        False, "combinator-low-memory: computes its pre-activations again, does not keep them", switch
    )
    dtype: str = option("float32", "fp32, bf16, fp16, fp64, or torch's names", converters.dtype_name)

    def check(self) -> None:
        if self.low_memory and self.combinator_type:
            both = f"{named('low_memory')} is {named('combinator_type')} combinator-low-memory"
            raise UsageError(f"{both}: leave out one of the two")


class ProfileModel(options.Predicting):
    """Measures and predicts memory and time of a whole decoder: parameters, gradients, AdamW and activations.

    memcheck profile-model --size small
    memcheck profile-model --size xl --context 1024 --bsz 4 --checkpointing --predict --device A100-80GB
    memcheck profile-model --autocast bf16 --components --output results/model
    """

    first = ("size", "attention_type", "context", "bsz", "mode", "dtype", "device", "predict", "output")
    takes = (
        *(options.DOUBTS, options.FORMAT, OUTPUT, INSPECTING, options.TIMED),
        *(flags_of(Step, "autocast", "checkpointing"), flags_of(Place, "torch_version")),
    )

    size: list[str] = option(("tiny",), "tiny, mini, small, medium, large, xl, 2.7B, all", names)
    attention_type: list[str] = option(("softmax",), f"{', '.join(options.DECODER_TYPES)}, all of them causal", names)
    feed_forward: list[str] = option(("swiglu",), "swiglu, combinator, combinator-low-memory", names)
    mode: list[str] = option(
        ("train",), "forward: no gradients; backward: forward and backward; train: and a step of AdamW", names
    )
    dtype: list[str] = option(("float32",), "dtype of the parameters: fp32, bf16, fp16, fp64", converters.dtype_names)
    context: list[int] = option((128,), "lengths S", converters.sizes)
    bsz: int = option(1, "batch size B", count)
    factor: int | None = option(None, "positions per block of compressed attention; default: 8", count)
    window: int | None = option(
        None, "newest positions that compressed attention sees as they are; default: none of them", count
    )
    compile: bool = option(False, "run under torch.compile", switch)
    predict: bool = option(False, "predict only: run and allocate nothing", switch)
    components: bool = option(False, "a table of what each part keeps; printed for a single case anyway", switch)

    def check(self) -> None:
        for name, words in (("device_from_this_gpu", f"takes {named('device')}"), ("torch_version", "has this torch")):
            if getattr(self, name) is not None and not self.predict:
                raise UsageError(f"{named(name)} is for {named('predict')}; a run {words}")


class Sweep(options.Predicting):
    """Runs a grid of cases, with tables and plots; the same command again continues where the last one stopped.

    memcheck sweep
    memcheck sweep --attention-type naive,softplus --bsz 8 --seq-len 256:16384:x2 --dim 16,32,64,128 --dry-run
    memcheck sweep --device RTX-4090 -- train.py --batch-size {8:64:x2}
    """

    forms = ("[options]", "--device GPU -- SCRIPT [its own options, with {8:64:x2}]")

    first = ("attention_type", "preset", "device", "bsz", "seq_len", "dim", "mode", "dtype", "output", "dry_run")
    group = options.RUNNING
    takes = (
        *(options.FORMAT, OUTPUT, *RUNS, options.SIZES, options.OF_OPERATORS, options.TWO_LENGTHS),
        options.grouped(options.RUNNING, flags_of(Place, "device")),
    )

    mode: list[str] = option(
        ("train",),
        "train: forward and backward; inference: forward; decode: a step from a state",
        names,
        group=options.OPERATORS,
    )
    dtype: list[str] | None = option(
        None,
        "fp32, bf16, fp16, fp64, or torch's names; default: fp32, on a GPU bf16",
        converters.dtype_names,
        group=options.OPERATORS,
    )
    preset: str | None = option(None, "a known grid; default: quick, if no flag names a case", choices=PRESETS)
    config: Path | None = option(
        None, "flags as TOML keys; [[grid]] tables are added up", converters.file, metavar="FILE.toml"
    )
    isolate: bool = option(False, "a new process for each case", switch)
    retry: bool = option(False, "run rows again that ended as error, killed, timeout or skipped", switch)
    dry_run: bool = option(False, "list the cases, run none", switch)
    workers: int | None = option(None, "cases at the same time; default: 1", count)
    devices: list[str] | None = option(None, "CUDA devices, with a worker on each", names, metavar="0,1")
    dask: str | None = option(None, "a dask scheduler whose workers run the cases", metavar="ADDRESS")
    predict_only: bool = option(False, "run nothing: a predicted row for every case", switch, group=options.PREDICTING)
