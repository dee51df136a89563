"""What each command is asked for. Its options are its flags, and its docstring its help and its examples.

Nothing here imports torch, so that --help and usage errors answer at once.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from memcheck.cli import launchers, options
from memcheck.cli.run_requests import ProfileAttention, ProfileCombinator, ProfileModel, Sweep
from memcheck.core import converters, devices
from memcheck.core.converters import count, names, number, switch
from memcheck.core.errors import UsageError
from memcheck.core.options import flags_of, named, option
from memcheck.core.step import Step
from memcheck.core.units import Growth
from memcheck.simulated.world import GPUS_OF_NODE, World

SIMULATED = "a simulated GPU: the script runs without one, and computes no numbers of large tensors"
MOST_GPUS = 64
RESULTS = "a folder of results, with records.jsonl"


class Compare(options.Request):
    """Compares two runs of a script, or two folders of results: memory to the byte, times beyond noise.

    memcheck compare before/ after/
    memcheck compare before/ after/ --fail-on-growth 5%
    memcheck compare before/ after/ --fail-on-growth 4KiB --allow-missing
    """

    takes = (options.TABLE_FORMAT,)
    forms = ("[options] BEFORE AFTER",)

    before: Path = option(
        None, f"{RESULTS}; or what memcheck run wrote", converters.folder, positional=True, metavar="BEFORE"
    )
    after: Path = option(None, "another one", converters.folder, positional=True, metavar="AFTER")
    fail_on_growth: Growth | None = option(
        None,
        "exit code 1 if a memory figure grew by more than 5% of itself, more than 4KiB, or with 5%,4KiB by more than "
        "both; by default at all; and if a case failed or is missing",
        converters.growth,
        nargs="?",
        const=Growth(),
    )
    allow_missing: bool = option(
        False, "with --fail-on-growth: cases of BEFORE may be missing, or without figures, in AFTER", switch
    )

    def check(self) -> None:
        if self.allow_missing and self.fail_on_growth is None:
            raise UsageError(f"{named('allow_missing')} is for {named('fail_on_growth')}: without it nothing fails")


class Devices(options.Request):
    """Lists every GPU that --device knows: its memory, its compute capability, and where these are from.

    memcheck devices
    memcheck devices --format csv
    """

    takes = (options.TABLE_FORMAT,)


class Fit(options.PredictedModel):
    """Predicts the largest batch, length or dimension that fits; of any model or operator, and runs nothing.

    memcheck fit --model train.py:make --find bsz --device L4
    memcheck fit --device RTX-4090 -- train.py --batch-size {}
    memcheck fit --device 24GiB --mode inference --dtype bf16 --bsz 1:64:x2 --plot capacity.png
    """

    forms = (
        "--model FILE.py:FUNCTION [options]",
        "--attention-type NAME [options]",
        "--device GPU -- SCRIPT [its own options, with {}]",
    )

    first = (*options.PredictedModel.first[:4], "find", *options.PredictedModel.first[4:])
    alone = ("no_changes", "doubts")
    ones = ("heads", "core_dim", "factor", "window")

    find: str = option("seq-len", "the size to maximise", choices=("seq-len", "bsz", "dim"))
    step: int | None = option(
        None, "try only multiples of N; default: 1, and 64 for lengths of a model or under torch.compile", count
    )
    up_to: int = option(2**30, "end of the search; default: 2^30", count)
    plot: Path | None = option(
        None, "draw the largest sizes as .png, .svg or .pdf", converters.file, group=options.OPERATORS
    )

    @property
    def axis(self) -> str:
        """The field of the size to maximise."""
        return self.find.replace("-", "_")

    def check(self) -> None:
        super().check()
        if getattr(self, self.axis) is not None:
            rule = f"leave out {named(self.axis)}, or find another one"
            raise UsageError(f"{named('find')} {self.find} searches for this size: {rule}")


class Gradcheck(options.Request):
    """Checks the operators' gradients; compares them with central differences, in float64.

    memcheck gradcheck
    memcheck gradcheck --operator softplus_attention --device cpu
    """

    takes = (options.FORMAT, options.HERE)

    operator: list[str] | None = option(
        None,
        "softplus_attention, linear_attention, compressed_attention, compressed_attention_pooled, linear_r, linear_l, "
        "combinator; default: all",
        names,
        repeatable=True,
        metavar="NAME",
    )


class Info(options.Request):
    """Shows this machine's versions, build, kernels and devices.

    memcheck info
    memcheck info --format json
    """

    format: str = option("text", "format of stdout", choices=("text", "json"))


class Predict(options.PredictedModel):
    """Predicts the memory of any model or operator on any device; runs nothing.

    memcheck predict --model train.py:make --device RTX-4090
    memcheck predict --hf-config config.json --bsz 1 --seq-len 4096 --dtype bf16 --fsdp 8 --device H100-80GB
    memcheck predict --attention-type naive --seq-len 4096 --bsz 64 --dim 512 --heads 8 --device A100-40GB
    """

    first = (*options.PredictedModel.first, "layers", "explain")
    ones = ("bsz", "dim", "heads", "seq_len", "query_len", "kv_len", "core_dim", "factor", "window")
    takes = (options.TWO_LENGTHS, flags_of(Step, "dense_grad"))

    html: Path | None = option(
        None, "write one self-contained page with the picture", converters.file, group=options.MODELS, metavar="FILE"
    )
    explain: bool = option(
        False,
        "each figure of the case as the sum of its terms; of a model what is alive at the peak by operator",
        switch,
    )
    layers: bool = option(
        False,
        "the tree of the model's modules, with shapes, parameters, bytes kept for backward and at the peak",
        switch,
        group=options.MODELS,
    )

    def check(self) -> None:
        super().check()
        if len(self.attention_type or ()) > 1:
            several = "predict takes one; memcheck sweep --predict-only takes several"
            raise UsageError(f"{named('attention_type')}: {several}")


class Report(options.Request):
    """Prints the tables of results: scaling, accounting, pictures, and a page for a browser.

    memcheck report results/ --html page.html
    memcheck report results/ --pivot forward_ms,saved_bytes --format markdown
    memcheck report results/ --plot memory,savings --output figures/
    """

    takes = (options.DOUBTS, options.TABLE_FORMAT)
    forms = ("[options] DIR...",)

    folders: list[Path] = option(
        None,
        "folders of results or runs, or memory snapshots",
        converters.folders,
        positional=True,
        nargs="+",
        metavar="DIR",
    )
    output: Path | None = option(
        None, "also write the tables there: Markdown, LaTeX, JSON and CSV", converters.folder, metavar="FOLDER"
    )
    units: bool = option(False, "bytes also in U, the bytes of one main tensor, and per query and key", switch)
    case: str | None = option(
        None, "only these rows, such as operator=softplus,seq-len=512,dim=64", metavar="NAME=VALUE[,..]"
    )
    pivot: list[str] | None = option(
        None,
        "a table by length and dimension for each field, such as forward_ms or saved_bytes",
        names,
        repeatable=True,
    )
    scaling: bool = option(False, "factors per doubling, and fitted exponents", switch)
    accounting: bool = option(False, "each case's memory by tensor: prediction beside measurement", switch)
    cs336: bool = option(False, "every row in the columns of cs336's published table", switch)
    html: Path | None = option(None, "write one self-contained page", converters.folder, metavar="FILE")
    plot: list[str] | None = option(
        None,
        "write pictures: all, memory, kept, time, decode, savings, or a field such as saved_bytes; as PNG and SVG, or "
        "memory.pdf as that alone; to --output, or beside the records; repeatable",
        names,
        repeatable=True,
        metavar="KIND",
    )
    x: str | None = option(
        None,
        "axis of --plot: seq-len, query-len, kv-len, dim, bsz, heads, core-dim, factor or window; default: what varies",
        metavar="AXIS",
    )
    linear: bool = option(False, "linear axes in --plot", switch)
    title: str = option("", "text before the title of each picture of --plot")


class Run(options.Request):
    """Runs a script, unchanged, and reports its memory: the peak, what was alive then, and the picture over time.

    memcheck run train.py --epochs 1
    memcheck run --device RTX-4090 train.py --epochs 1
    memcheck run --device H100-80GB --ranks 8 --output results/train -m package.train
    """

    takes = (options.MEASURED,)
    forms = ("[options] SCRIPT [its own options]", "[options] -m MODULE [its own options]")
    first = ("script", "module", "device", "memory_limit", "output", "snapshot")
    of_strangers = "; the script's options stand after its name: memcheck run SCRIPT {} ..."

    device: str | None = option(
        None,
        "cpu, cuda or cuda:1; or a GPU such as RTX-4090 or a size such as 40GiB, which is simulated; default: cuda if "
        "there is a GPU",
        converters.text,
    )
    script: list[str] | None = option(
        None,
        "as for python; also a notebook, and python, torchrun or accelerate launch with their options",
        positional=True,
        nargs="...",
        metavar="SCRIPT ARGS",
    )
    module: list[str] | None = option(
        None, "a module, as for python -m", letter="-m", nargs="...", metavar="MODULE ARGS"
    )
    output: Path = option(Path("results"), "folder of run.html, run.png, run.json, replaced", converters.folder)
    snapshot: Path | None = option(
        None,
        "all that the GPU's allocator did, for memcheck snapshot; default: if memory runs out, the last step, as "
        "run-snapshot.pickle in the folder",
        converters.file,
    )
    steps: int | None = option(
        None,
        "end after N optimizer steps; default: when three in a row, or rounds of up to four, have allocated the same",
        count,
        group=SIMULATED,
        exclusive="end",
    )
    whole: bool = option(False, "run the script to its own end", switch, group=SIMULATED, exclusive="end")
    changes: bool = option(
        False,
        "run it again with each setting that needs no change of its code, and say what it gives",
        switch,
        group=SIMULATED,
    )
    doubts: bool = option(
        False, "list what the simulated GPU answered and does not know, by line of Python", switch, group=SIMULATED
    )
    ranks: int | None = option(
        None, "the script is one of N processes that torchrun starts, each with a GPU", count, group=SIMULATED
    )
    rank: int = option(0, "which of them, from 0", number, group=SIMULATED, exclusive="rank")
    all_ranks: bool = option(
        False, "run each of them, in a folder rank-0, rank-1, ... of its own", switch, group=SIMULATED, exclusive="rank"
    )
    gpus: int | None = option(
        None, "GPUs of the machine; default: 1, and up to 8 for several ranks", count, group=SIMULATED
    )

    launch: launchers.Launch | None = None  # By what the script was to be started.

    def check(self) -> None:
        self._take_launcher()
        if self.simulated:
            devices.device_named(self.simulated)
            if self.ranks is None and (
                other := next((name for name in ("rank", "all_ranks") if name in self.asked), None)
            ):
                raise UsageError(f"{named(other)} needs {named('ranks')}")
            if self.machine_gpus > MOST_GPUS:
                raise UsageError(f"{named('gpus')} must be at most {MOST_GPUS}, got {self.gpus}")
            if self.changes and self.all_ranks:
                raise UsageError(
                    f"{named('changes')} is of one rank: give {named('rank')} in place of {named('all_ranks')}"
                )
            self.world  # noqa: B018  # It checks the rank.
            return
        for name in ("steps", "whole", "changes", "doubts", "ranks", "rank", "all_ranks", "gpus"):
            if self.given(name):
                raise UsageError(f"{named(name)} is for a simulated GPU, as of {named('device')} RTX-4090")

    def _take_launcher(self) -> None:
        """Replaces python, torchrun or accelerate launch by the script and its ranks."""
        self.launch = launch = launchers.launch_of(["-m", *self.module] if self.module else self.script or [])
        if launch is None:
            return
        is_module = launch.words[0] == "-m"
        self.script, self.module = (None, launch.words[1:]) if is_module else (launch.words, None)
        if launch.ranks is None:
            return
        if not self.simulated:
            words = f"{named('device')} H100-80GB {named('ranks')} {launch.ranks} {shlex.join(launch.words)}"
            rule = f"memcheck run {words} runs one of its ranks on a simulated GPU"
            raise UsageError(f"{launch.launcher} starts processes that would not be measured: {rule}")
        if self.ranks is None and (launch.launcher == "torchrun" or launch.ranks > 1):
            self.ranks = launch.ranks
            self.rank = self.rank or launch.rank

    @property
    def world(self) -> World | None:
        """The ranks, and which this one is; None for a script that is alone."""
        return World(self.rank, self.ranks, self.machine_gpus) if self.ranks else None

    @property
    def machine_gpus(self) -> int:
        return self.gpus or min(self.ranks or 1, GPUS_OF_NODE)

    @property
    def simulated(self) -> str | None:
        """The name of the GPU to simulate; None for a device of this machine."""
        return None if re.fullmatch(r"cpu|cuda(:\d+)?", self.device or "cpu") else self.device

    def before_torch(self) -> None:
        if self.simulated:
            from memcheck.simulated.children import simulate_with_children

            if not self.all_ranks:  # Each is a process of its own.
                simulate_with_children(self.simulated, self.memory_limit, self.machine_gpus, self.world)


class Snapshot(options.Request):
    """Says what a memory snapshot of torch.cuda.memory holds: the peak, why memory ran out, and what would have fitted.

    memcheck snapshot snapshot.pickle
    memcheck snapshot snapshot.pickle --settings expandable_segments:True,max_split_size_mb:256
    memcheck snapshot snapshot.pickle --device L40S --html snapshot.html
    """

    takes = (options.TABLE_FORMAT,)
    forms = ("[options] FILE...",)

    files: list[Path] = option(
        None,
        "files of torch.cuda.memory._dump_snapshot: pickles, which run no code, or JSON; also compressed by gzip; two "
        "are compared, more have a row each",
        converters.files,
        positional=True,
        nargs="+",
        metavar="FILE",
    )
    settings: list[str] | None = option(
        None,
        "replay the recorded requests under these settings, as in PYTORCH_ALLOC_CONF; default: a few usual ones",
        converters.texts,
        repeatable=True,
        metavar="TEXT",
    )
    device: str | None = option(None, "replay them on this GPU, such as L40S, or 40GiB", converters.text)
    memory_limit: int | None = option(
        None, "replay them where the process may reserve this much", converters.size_in_bytes
    )
    html: Path | None = option(None, "write one self-contained page with the picture", converters.file, metavar="FILE")
    plot: Path | None = option(None, "draw what was alive over time as .png, .svg or .pdf", converters.file)


# The commands by what they are for, in the order of memcheck --help.
TASKS: dict[str, dict[str, type[options.Request]]] = {
    "Look at a script": {"run": Run, "snapshot": Snapshot},
    "Will it fit?": {"predict": Predict, "fit": Fit},
    "Compare attentions": {
        "profile-attention": ProfileAttention,
        "profile-combinator": ProfileCombinator,
        "profile-model": ProfileModel,
        "sweep": Sweep,
    },
    "Check your own results": {"compare": Compare, "report": Report},
    "Machine": {"devices": Devices, "info": Info, "gradcheck": Gradcheck},
}
COMMANDS = {name: request for commands in TASKS.values() for name, request in commands.items()}
