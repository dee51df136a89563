"""The commands and their flags. Nothing here imports torch, so that --help and usage errors answer at once.

Each command is a function that adds its flags. Its docstring is the command's help: what it does, then examples.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memcheck.cli.options import (
    ATTENTION_TYPES,
    COMBINATOR_TYPES,
    DECODER_TYPES,
    DEFAULT_SIZES,
    DEFAULT_TYPES,
    GPU_LENGTHS,
    GPU_SIZES,
    MODES,
    add_device_arguments,
    add_gpu_argument,
    count,
    counts,
    file,
    folder,
    growth,
    norm,
    ordinal,
    reference,
    seconds,
    size,
    sizes,
    version,
    words,
)
from memcheck.core.arguments import OPTIMIZERS
from memcheck.core.devices import DEVICES
from memcheck.core.errors import UsageError, did_you_mean
from memcheck.core.units import Growth

REPORT_FORMATS = ("table", "markdown", "csv", "latex", "json")
RESULTS = "a folder of results: with records.jsonl, models.jsonl, or both"
PRESETS = ("quick", "memcheck-pyt", "cs336", "ato")
METAVARS: dict[Any, str] = {
    count: "N",
    ordinal: "N",
    counts: "N[,N]",
    sizes: "N[,N]",
    size: "40GiB",
    growth: "5%",
    norm: "X",
    seconds: "S",
    version: "2.13",
    file: "FILE",
    reference: "FILE.py:NAME",
    folder: "DIR",
}
# Flags that several commands have.
FLAGS: dict[str, dict[str, Any]] = {
    "--attention-type": {"help": f"{', '.join(ATTENTION_TYPES)}, or an operator of --plugin"},
    "--bsz": {"help": "batch size B", "metavar": "N"},
    "--dim": {"help": "token dimension E", "metavar": "N"},
    "--heads": {"help": "number of heads H, for operators that have heads", "metavar": "N"},
    "--seq-len": {"help": "both lengths, S and T", "metavar": "N"},
    "--query-len": {"help": "number of queries S; default: --kv-len", "metavar": "N"},
    "--kv-len": {
        "help": "number of keys T, or tokens of the state in --mode decode; default: --query-len",
        "metavar": "N",
    },
    "--core-dim": {"help": "core dimension of softplus attention; default: --dim", "metavar": "N"},
    "--factor": {"help": "positions per block of compressed attention; default: 8", "metavar": "N"},
    "--dtype": {"help": "fp32, bf16, fp16, fp64, or torch's names; default: fp32", "default": "float32"},
    "--mode": {
        "help": "train: forward and backward; inference: forward; decode: one step from a state; default: train",
        "choices": MODES,
        "default": "train",
    },
    "--device": {"help": "cpu, cuda or cuda:1; default: cuda if there is a GPU"},
    "--memory-limit": {"help": "out of memory above this; units: B, KiB, MiB, GiB, KB, MB, GB", "type": size},
    "--passes": {"help": "timed passes; default: 10, or as many as fit into 3 s", "type": count},
    "--max-seconds-per-case": {
        "help": "no timed pass of a case begins after S seconds; 0: no limit; default: 60 on a CPU, else 0",
        "type": seconds,
    },
    "--plugin": {
        "help": "a file or module that registers your operators (memcheck.bench.catalog.register); repeatable",
        "action": "append",
        "metavar": "FILE.py",
    },
    "--output": {
        "help": "folder of the results; records of the same cases are replaced, others stay; default: results",
        "type": folder,
    },
    "--format": {"help": "format of stdout; default: table", "choices": ("table", "json"), "default": "table"},
    "--torch-version": {
        "help": "the version of torch to predict for, 2.7 or newer; default: the installed one",
        "type": version,
    },
    "--snapshot": {"help": "write memory over time for the viewer at pytorch.org/memory_viz", "type": file},
    "--trace": {"help": "write torch.profiler's trace, and print which kernels took the time", "type": file},
}


def add(parser: argparse._ActionsContainer, *flags: str, more: str = "", **changes: Any) -> None:
    """Adds flags: as FLAGS describes them, with changes. more: added to the help."""
    for flag in flags:
        settings = {**FLAGS.get(flag, {}), **changes}
        if more:
            settings["help"] += f"; {more}"
        if metavar := METAVARS.get(settings.get("type")):
            settings.setdefault("metavar", metavar)
        parser.add_argument(flag, **settings)


def add_names(parser: argparse._ActionsContainer, flag: str, more: str = "repeatable", **changes: Any) -> None:
    """Adds a flag that takes a list of names, and may be repeated."""
    add(parser, flag, action="extend", type=words, metavar="NAME[,NAME]", more=more, **changes)


def add_switches(parser: argparse._ActionsContainer, default: bool | None = False, **switches: str) -> None:
    """Adds flags without a value, by their names and help texts."""
    for name, meaning in switches.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", default=default, help=meaning)


def add_table_switches(parser: argparse._ActionsContainer, units: bool = True) -> None:
    """Adds the flags that say how much a table shows."""
    if units:
        add_switches(parser, units="bytes also in U, the bytes of one main tensor, and per query and key")
    add_switches(parser, doubts="every doubt about a figure, below the table")


def add_causal(parser: argparse._ActionsContainer, default: bool | None = True) -> None:
    meaning = "each query sees only the keys up to its own position; default: --causal"
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=default, help=meaning)


def add_batches(parser: argparse._ActionsContainer, more: str = "repeatable") -> None:
    """Adds the flags of packed and padded batches. They are None if not given."""
    batch = f"sequences of these lengths, as a padded and as a packed batch, in place of --bsz and lengths; {more}"
    add(parser, "--lengths", type=counts, action="append", metavar="N,N[,N]", help=batch)
    add_switches(
        parser.add_mutually_exclusive_group(),
        None,
        packed="with --lengths: only the batch that has the sequences one behind the other",
        padded="with --lengths: only the batch that has the sequences each padded to the longest",
    )


# Flags that belong to operators of the catalog, and those that belong to models.
OF_OPERATORS = words(
    "attention-type,query-len,kv-len,lengths,packed,padded,dim,heads,core-dim,factor,causal,compile,plot"
)
OF_MODELS = words(
    "autocast,optimizer,loss,drop-outputs,checkpointing,attention,steps,accumulate,clip-grad-norm,build-on,fsdp,tp,ddp,"
    "rank,calibration,no-changes,doubts,traceback"
)
DTYPE_OF_MODELS = "dtype of parameters and floating-point inputs; default: as the model is built"


def add_model_flags(parser: Parser) -> None:
    """Adds the flags that name a model and a step of it."""
    group = parser.add_argument_group("models", "any model, in place of an operator of --attention-type")
    returns = "a function that returns (model, inputs); its parameters bsz and seq_len get --bsz and --seq-len"
    source = group.add_mutually_exclusive_group()
    add(source, "--model", type=reference, help=returns)
    config = "a config.json of Hugging Face transformers (pip install transformers); nothing is downloaded"
    add(source, "--hf-config", type=file, help=config)
    optimizers = f"{', '.join(OPTIMIZERS)}; default: adamw, whose step follows the backward"
    add(group, "--optimizer", choices=tuple(OPTIMIZERS), metavar="NAME", help=optimizers)
    autocast = "products in bf16 (if no name is given) or fp16, with parameters as they are"
    add(group, "--autocast", nargs="?", const="bf16", choices=("bf16", "fp16"), help=autocast)
    layers = "keep only each layer's input and run the layer again in the backward"
    add_switches(group, None, checkpointing=layers)
    attention = "attention of a model of --hf-config; default: sdpa if it has it"
    add(group, "--attention", choices=("sdpa", "eager"), help=attention)
    loss = "a function of the model's output; default: output.loss, else the only scalar, else every output"
    add(group, "--loss", type=reference, help=loss)
    add_switches(group, None, drop_outputs="keep only the loss alive in the backward, as the Trainer of transformers")
    steps = "1: the very first step, in which the optimizer makes its state; 2: a later one; default: 2"
    add(group, "--steps", type=count, help=steps)
    accumulate = "backwards of a step; the figures are those of the last one; default: 1"
    add(group, "--accumulate", type=count, help=accumulate)
    add(group, "--clip-grad-norm", type=norm, help="clip gradients to this norm before the optimizer's step")
    build = "cpu: build the model of --model with real tensors; default: meta, floating-point tensors without data"
    add(group, "--build-on", choices=("meta", "cpu"), help=build)
    splits = group.add_mutually_exclusive_group()
    fsdp = "one process of N of FSDP2: fully_shard on each block of the largest ModuleList, then on the model"
    add(splits, "--fsdp", type=count, help=fsdp)
    add(
        splits,
        "--tp",
        type=count,
        help="one process of N of tensor parallelism, by the plan of the model of --hf-config",
    )
    add(splits, "--ddp", type=count, help="one process of N of DistributedDataParallel")
    add(group, "--rank", type=ordinal, help="the process that is predicted, from 0; default: 0")
    add_switches(group, None, traceback="the whole traceback of an error in the model's code")


def add_model_output_flags(parser: Parser, no_changes: str) -> None:
    group = parser.add_argument_group("output of models")
    table = "a table of memcheck calibrate; the prediction is for the CPU, threads and torch that wrote it"
    add(group, "--calibration", type=file, help=table)
    add_switches(group, no_changes=no_changes)
    add_table_switches(group, units=False)


def check_model_flags(args: argparse.Namespace) -> None:
    """UsageError: flags that do not belong together."""
    files = {"--model": (args.model or "").rpartition(":")[0], "--loss": (args.loss or "").rpartition(":")[0]}
    files = {name: file for name, file in files.items() if file.endswith(".py")}
    files |= {name: getattr(args, name[2:].replace("-", "_"), None) for name in ("--hf-config", "--calibration")}
    for name, path in files.items():
        if path and not Path(path).is_file():
            raise UsageError(f"{name}: there is no file {path}")
    flag = "--model" if args.model else "--hf-config" if args.hf_config else None
    foreign = OF_OPERATORS if flag else OF_MODELS
    for name in foreign:
        if getattr(args, name.replace("-", "_"), None) not in (None, False):
            needs = f"is for operators, not for {flag}" if flag else "needs --model or --hf-config"
            raise UsageError(f"--{name} {needs}")
    predicts_caches = flag == "--hf-config" and hasattr(args, "kv_heads")
    if flag and args.mode == "decode" and not predicts_caches:
        raise UsageError(f"--mode decode is for operators, not for {flag}")
    if getattr(args, "calibration", None) and args.device not in (None, "cpu"):
        raise UsageError(f"--calibration is of a CPU, and --device {args.device} is none")
    if getattr(args, "calibration", None) and args.torch_version:
        raise UsageError("--calibration is of the torch that wrote it: leave out --torch-version")
    if args.rank is not None and not (args.fsdp or args.tp or args.ddp):
        raise UsageError(f"--rank {args.rank} needs --fsdp, --tp or --ddp")
    if args.rank is not None and args.rank >= (processes := args.fsdp or args.tp or args.ddp):
        raise UsageError(f"--rank must be from 0 to {processes - 1}, got {args.rank}")
    if args.attention and not args.hf_config:
        raise UsageError("--attention needs --hf-config; a factory of --model chooses its own")
    if args.mode == "inference":
        for name in ("optimizer", "checkpointing", "loss", "drop-outputs", "accumulate", "clip-grad-norm"):
            if getattr(args, name.replace("-", "_")) not in (None, "none"):
                raise UsageError(f"--{name} needs a backward, which --mode inference has not")
    if args.clip_grad_norm is not None and args.optimizer == "none":
        raise UsageError("--clip-grad-norm needs an optimizer, got --optimizer none")
    if args.hf_config and importlib.util.find_spec("transformers") is None:
        raise UsageError("--hf-config needs transformers: pip install transformers")


def add_result_folders(parser: argparse.ArgumentParser, nargs: str = "+", more: str = "") -> None:
    parser.add_argument("folders", nargs=nargs, type=Path, metavar="DIR", help=f"folders of results{more}")
    add(parser, "--format", choices=REPORT_FORMATS)
    meaning = "also write the tables there: Markdown, LaTeX, JSON and CSV"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=meaning)


def calibrate(parser: Parser) -> None:
    """Runs the operators of a model once each, alone, on this machine's CPU and writes what they take to a table.

    memcheck calibrate --model train.py:make --bsz 8
    memcheck calibrate --hf-config config.json --bsz 8 --seq-len 512 --output cpu.jsonl
    """
    add(parser, "--bsz", type=count)
    add(parser, "--seq-len", type=count, help="length of a sequence")
    add(parser, "--dtype", default=None, help=DTYPE_OF_MODELS)
    add(parser, "--mode", choices=MODES[:2], help="train: forward and backward; inference: forward; default: train")
    add(parser, "--threads", type=count, help="threads of torch; default: those of torch here")
    add_model_flags(parser)
    table = "the table; what it has already is not run again; default: calibration.jsonl"
    add(parser, "--output", type=file, metavar="FILE", default=Path("calibration.jsonl"), help=table)
    add(parser, "--format")
    parser.check = check_model_flags


def compare(parser: argparse.ArgumentParser) -> None:
    """Compares two folders of results, case by case: memory to the byte, times beyond noise.

    memcheck compare before/ after/
    memcheck compare before/ after/ --fail-on-growth 5%
    memcheck compare before/ after/ --fail-on-growth 4KiB --allow-missing
    """
    parser.add_argument("before", type=Path, metavar="BEFORE", help=RESULTS)
    parser.add_argument("after", type=Path, metavar="AFTER", help="another folder")
    meaning = (
        "exit code 1 if a memory figure grew by more than 5%% of itself, more than 4KiB, or with 5%%,4KiB by more than "
        "both; by default at all; and if a case failed or is missing"
    )
    add(parser, "--fail-on-growth", nargs="?", const=Growth(), type=growth, help=meaning)
    missing = "with --fail-on-growth: cases of BEFORE may be missing, or without figures, in AFTER"
    add_switches(parser, allow_missing=missing)
    add(parser, "--format", choices=REPORT_FORMATS)


def completion(parser: argparse.ArgumentParser) -> None:
    """Prints a completion script for a shell.

    memcheck completion bash > ~/.local/share/bash-completion/completions/memcheck
    memcheck completion zsh > ~/.zfunc/_memcheck
    memcheck completion fish > ~/.config/fish/completions/memcheck.fish
    """
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def fit(parser: Parser) -> None:
    """Predicts the largest length, batch or dimension that fits a device, of operators or any model; runs nothing.

    memcheck fit --device H100-80GB --bsz 8 --dim 512 --heads 8
    memcheck fit --hf-config config.json --find bsz --seq-len 4096 --device A100-40GB
    memcheck fit --hf-config config.json --find seq-len --bsz 1 --fsdp 8 --device H100-80GB
    memcheck fit --device 24GiB --mode inference --dtype bf16 --bsz 1:64:x2 --plot capacity.png
    """
    axes = ("seq-len", "bsz", "dim")
    add(parser, "--find", choices=axes, default="seq-len", help="the size to maximise; default: seq-len")
    add_names(parser, "--attention-type", more=f"repeatable; default: {','.join(DEFAULT_TYPES)}")
    add(parser, "--bsz", type=sizes, more="default: 1")
    add(parser, "--seq-len", type=sizes, more="in --mode decode tokens of the state; default: 1024")
    scaled = "--find bsz repeats the sequences, --find seq-len scales them all"
    add_batches(parser, f"{scaled}; repeatable")
    add(parser, "--dim", type=sizes, more="default: 256")
    add(parser, "--heads", type=count, more="default: 4")
    add(parser, "--core-dim", "--factor", type=count)
    add(parser, "--dtype", default=None, more=f"of models: {DTYPE_OF_MODELS}")
    add(parser, "--mode")
    add_causal(parser, None)
    add_device_arguments(parser)
    add(parser, "--memory-limit", help="a limit below the device's memory")
    add(parser, "--torch-version")
    add(parser, "--step", type=count, help="try only multiples of N; default: 1, and 64 for lengths of a model")
    add(parser, "--up-to", type=count, default=2**30, help="end of the search; default: 2^30")
    add(parser, "--plot", type=file, help="draw the largest sizes as .png, .svg or .pdf")
    add_switches(parser, fail_on_oom="exit code 3 unless every operator fits at some size")
    add_model_flags(parser)
    add_model_output_flags(parser, "do not predict what would allow more")
    add(parser, "--format", "--plugin")
    parser.check = check_model_flags


def gradcheck(parser: argparse.ArgumentParser) -> None:
    """Compares the gradients of the operators with central differences, in float64.

    memcheck gradcheck
    memcheck gradcheck --operator softplus_attention --device cpu
    """
    known = (
        "softplus_attention, linear_attention, compressed_attention, compressed_attention_pooled, linear_r, linear_l"
    )
    all_of_them = f"{known}, combinator; repeatable; default: all"
    add(parser, "--operator", action="append", default=[], metavar="NAME", help=all_of_them)
    add(parser, "--device", "--format")


def info(parser: argparse.ArgumentParser) -> None:
    """Shows versions, the build, kernels, and the devices of this machine.

    memcheck info
    memcheck info --format json
    """
    add(parser, "--format", choices=("text", "json"), default="text", help="format of stdout; default: text")


def mixed_precision(parser: argparse.ArgumentParser) -> None:
    """Shows what 16-bit arithmetic does to numbers: long sums by dtype, and the stages of a network under autocast.

    memcheck mixed-precision
    memcheck mixed-precision --dtype fp16 --format json
    """
    add(parser, "--dtype", default="bf16", help="what autocast casts to: bf16 or fp16; default: bf16")
    add(parser, "--device", "--format")


def plot(parser: argparse.ArgumentParser) -> None:
    """Draws the records of a folder of results.

    memcheck plot results/
    memcheck plot results/ --kind memory,time --format pdf --output figures/
    memcheck plot results/ --y saved_bytes --x dim --log
    """
    parser.add_argument("folder", type=Path, metavar="DIR", help=RESULTS)
    kinds = (
        "every picture of these kinds: memory, prediction, terms, savings, time, decode, models; default: what makes "
        "sense"
    )
    add_names(parser, "--kind", help=kinds)
    add(parser, "--x", metavar="AXIS", help="seq-len, query-len, kv-len, dim or counted; default: what varies")
    add(parser, "--y", metavar="FIELD", help="a field of the records in bytes or ms, such as saved_bytes")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--log", dest="log", action="store_true", default=None, help="logarithmic axes only")
    scale.add_argument("--linear", dest="log", action="store_false", help="linear axes only; default: both")
    add_names(parser, "--attention-type", help="only these operators; default: all")
    add(parser, "--title", default="", help="text before the title of each picture")
    add(parser, "--output", help="folder of the pictures, which are replaced; default: beside the records")
    formats = "png, svg, pdf; default: png,svg"
    parser.add_argument("--format", type=words, default="png,svg", metavar="NAME[,NAME]", help=formats)


def predict(parser: Parser) -> None:
    """Predicts the memory of an operator or of any model on any device; runs nothing.

    memcheck predict --attention-type naive --seq-len 4096 --bsz 64 --dim 512 --heads 8 --device A100-40GB
    memcheck predict --mode decode --kv-len 8192 --dim 4096 --heads 32 --kv-heads 8 --layers 32 --device A100-40GB
    memcheck predict --model train.py:make --bsz 8 --optimizer adamw --device RTX-4090 --fail-on-oom
    memcheck predict --hf-config config.json --bsz 1 --seq-len 4096 --dtype bf16 --fsdp 8 --device H100-80GB
    """
    combinators = f"also {', '.join(COMBINATOR_TYPES)}; default: naive"
    add(parser, "--attention-type", metavar="NAME", more=combinators)
    for flag, default in DEFAULT_SIZES.items():
        add(parser, f"--{flag}", type=count, more=f"default: {default}")
    add(parser, "--seq-len", type=count, more="default: 1024")
    add(parser, "--query-len", "--kv-len", type=count)
    add_batches(parser, "given once")
    add(parser, "--core-dim", "--factor", type=count)
    add_causal(parser, None)
    add(parser, "--dtype", default=None, more=f"of models: {DTYPE_OF_MODELS}")
    add(parser, "--mode")
    add_device_arguments(parser)
    add(parser, "--memory-limit", help="a limit below the device's memory")
    add(parser, "--threads", type=count, help="threads of a CPU; default: those of torch here")
    add(parser, "--torch-version")
    add_switches(
        parser,
        compile="the case runs under torch.compile, for which nothing is predicted",
        dense_grad="the gradient of the output is a full tensor",
        expandable_segments="as with PYTORCH_ALLOC_CONF=expandable_segments:True",
        fail_on_oom="exit code 3 unless the case is predicted to fit",
    )
    add_model_flags(parser)
    add_model_output_flags(parser, "do not predict what would need less")
    add(parser, "--format", "--plugin")
    add_decoding_flags(parser.add_argument_group("a model that decodes, in --mode decode"))
    parser.check = check_model_flags


def add_decoding_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags of a KV cache, or of the state of another attention."""
    add(group, "--layers", type=count, help="attention layers, each with a cache; default: 1")
    add(group, "--kv-heads", type=count, help="heads of keys and values; default: --heads")
    add(group, "--block-size", type=count, help="tokens per block of a paged cache; default: 1")
    add(group, "--weights", type=size, help="what the model's weights take beside the caches; default: 0B")
    add_switches(group, concatenate="a step makes a longer cache beside the old one, as torch.cat does")


def profile_attention(parser: argparse.ArgumentParser) -> None:
    """Measures memory and time of attention operators: a table, records and a plot.

    memcheck profile-attention
    memcheck profile-attention --attention-type naive,softplus --seq-len 1024,2048 --dtype bf16 --memory-limit 100MiB
    memcheck profile-attention --attention-type naive --seq-len 1024 --explain --predict
    memcheck profile-attention --attention-type softmax,softplus --lengths 4096,1000,300
    """
    add(parser, "--preset", choices=PRESETS[:1], default="quick", help="values of flags not given; default: quick")
    add_names(parser, "--attention-type", more=f"repeatable; default: {','.join(DEFAULT_TYPES)}")
    for flag, default in DEFAULT_SIZES.items():
        add(parser, f"--{flag}", type=count, more=f"default: {default}, on a GPU {GPU_SIZES[flag]}")
    lengths = f"default: 256 to 4096, on a GPU {GPU_LENGTHS[0]} to {GPU_LENGTHS[-1]}"
    add(parser, "--seq-len", type=counts, metavar="N[,N]", more=lengths)
    add(parser, "--query-len", "--kv-len", type=counts, metavar="N[,N]")
    add_batches(parser)
    add(parser, "--core-dim", "--factor", type=count)
    add_causal(parser)
    add(parser, "--dtype", default=None, more="on a GPU bf16")
    add_case_flags(parser)


def profile_combinator(parser: argparse.ArgumentParser) -> None:
    """Measures memory and time of the combinator: a table, records and a plot.

    memcheck profile-combinator --bsz 64 --query-len 512 --dim 128
    memcheck profile-combinator --combinator-type combinator,combinator-low-memory --no-time
    """
    add(parser, "--bsz", type=count, default=64, more="default: 64")
    add(parser, "--dim", type=count, default=128, more="default: 128")
    add(parser, "--query-len", type=counts, metavar="N[,N]", help="lengths S; default: 512, or 1 in --mode decode")
    add_names(parser, "--combinator-type", help=f"{', '.join(COMBINATOR_TYPES)}; default: combinator")
    add_switches(parser, low_memory="combinator-low-memory: computes its pre-activations again, does not keep them")
    add(parser, "--dtype")
    add_case_flags(parser)


def add_case_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the commands that run operators case by case."""
    add(parser, "--mode", "--device", "--memory-limit", "--passes", "--max-seconds-per-case")
    add_switches(
        parser,
        compile="run under torch.compile, which compiles before the measurement",
        no_time="measure memory only",
        predict="a predicted row under each measured one, and their ratio",
        nvtx="mark passes with NVTX ranges, for Nsight Systems",
    )
    add(parser, "--output", default=Path("results"))
    add(parser, "--format", "--plugin")
    add_table_switches(parser)
    explain = "list the N (10) largest tensors alive at each peak and kept for backward, by what allocated them"
    add(parser, "--explain", type=count, nargs="?", const=10, help=explain)
    timeline = "draw memory over time by what allocated it, as .png, .svg or .pdf; one file per case"
    add(parser, "--timeline", type=file, help=timeline)
    add(parser, "--snapshot", "--trace", more="one file per case")


def profile_model(parser: argparse.ArgumentParser) -> None:
    """Measures and predicts memory and time of a whole decoder: parameters, gradients, AdamW and activations.

    memcheck profile-model --size small --attention-type naive,softplus
    memcheck profile-model --size xl --context 1024 --bsz 4 --checkpointing --predict --device A100-80GB
    memcheck profile-model --autocast bf16 --components --output results/model
    """
    for flag, known, default in (
        ("--size", "tiny, mini, small, medium, large, xl, 2.7B, all", "tiny"),
        ("--attention-type", f"{', '.join(DECODER_TYPES)}, all of them causal", "softmax"),
        ("--feed-forward", "swiglu, combinator, combinator-low-memory", "swiglu"),
        ("--mode", "forward: no gradients; backward: forward and backward; train: and a step of AdamW", "train"),
        ("--dtype", "dtype of the parameters: fp32, bf16, fp16, fp64", "fp32"),
    ):
        meaning = f"{known}; default: {default}"
        parser.add_argument(flag, type=words, default=[default], metavar="NAME[,NAME]", help=meaning)
    add(parser, "--context", type=counts, default=[128], help="lengths S; default: 128")
    add(parser, "--bsz", type=count, default=1, more="default: 1")
    add(parser, "--factor", type=count)
    autocast = "compute products in bf16 (if no name is given) or fp16, with parameters in fp32"
    add(parser, "--autocast", nargs="?", const="bf16", metavar="DTYPE", help=autocast)
    layers = "keep only each layer's input and run the layer again in the backward; default: --no-checkpointing"
    add(parser, "--checkpointing", action=argparse.BooleanOptionalAction, default=False, help=layers)
    add_switches(
        parser,
        compile="run under torch.compile, for which nothing is predicted",
        predict="predict only: run and allocate nothing",
        no_time="measure memory only",
        components="a table of what each part keeps; printed for a single case anyway",
        nvtx="mark passes and modules with NVTX ranges, for Nsight Systems",
    )
    add(parser, "--device", metavar="NAME", more=f"with --predict also {', '.join(DEVICES)}, or a size")
    add_gpu_argument(parser)
    add(parser, "--torch-version", more="with --predict")
    add(parser, "--memory-limit")
    add(parser, "--passes", help="timed passes; default: 10, or as many as fit into 10 s")
    add(parser, "--snapshot", "--trace", more="for a single case")
    add(parser, "--output", default=Path("results"))
    add(parser, "--format")
    add_table_switches(parser, units=False)


def published(parser: argparse.ArgumentParser) -> None:
    """Sets our figures beside published tables: those of result folders, or by formula without a run.

    memcheck published
    memcheck published results/ --plot ratios.png
    memcheck published --predict
    """
    add_result_folders(parser, "*", more="; default: by formula")
    add_switches(parser, predict="predict every published row for the GPU that it was measured on")
    add(parser, "--plot", type=Path, metavar="FILE", help="draw the ratios as .png, .svg or .pdf")


def report(parser: argparse.ArgumentParser) -> None:
    """Prints tables, scaling and accounting of result folders, and writes a page for a browser.

    memcheck report results/
    memcheck report results/ --html page.html
    memcheck report results/ --pivot forward_ms,saved_bytes --format markdown
    """
    add_result_folders(parser)
    add_table_switches(parser)
    rows = "only these rows, such as operator=softplus,seq-len=512,dim=64"
    add(parser, "--case", metavar="NAME=VALUE[,..]", help=rows)
    pivot = "a table by length and dimension for each field, such as forward_ms or saved_bytes"
    add_names(parser, "--pivot", default=[], help=pivot)
    add_switches(
        parser,
        scaling="factors per doubling, and fitted exponents",
        accounting="each case's memory by tensor: prediction beside measurement",
        cs336="every row in the columns of cs336's published table",
    )
    add(parser, "--html", type=Path, metavar="FILE", help="write one self-contained page")


def run(parser: argparse.ArgumentParser) -> None:
    """Runs a script, unchanged, and reports its memory: the peak, what was alive then, and the picture over time.

    memcheck run train.py --epochs 1
    memcheck run --memory-limit 8GiB --output results/train train.py
    memcheck run -m package.train
    """
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="as for python")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ARGS", help="a module, as for python -m"
    )
    add(parser, "--device", metavar="NAME", help="whose memory: cpu, cuda, cuda:1; default: cuda if there is a GPU")
    add(parser, "--memory-limit", help="OutOfMemoryError above this; units: B, KiB, MiB, GiB, KB, MB, GB")
    add(parser, "--output", default=Path("results"), help="folder of run.html, run.png, run.json; default: results")


def sweep(parser: argparse.ArgumentParser) -> None:
    """Runs a grid of cases, with tables and plots. The same command again continues where the last one stopped.

    memcheck sweep
    memcheck sweep --preset memcheck-pyt --memory-limit 40GiB --output results/memcheck-pyt
    memcheck sweep --attention-type naive,softplus --bsz 8 --seq-len 256:16384:x2 --dim 16,32,64,128 --dry-run
    memcheck sweep --attention-type softmax,softplus --lengths 2048,2048 --lengths 2048,512,512 --dim 128,256
    """
    # All defaults are None, so that flags can be told from values of presets and TOML files.
    add(parser, "--preset", choices=PRESETS, help="a known grid; default: quick, if no flag names a case")
    add(parser, "--config", metavar="FILE.toml", help="flags as TOML keys; [[grid]] tables are added up")

    grid = parser.add_argument_group("grid", "every combination is a case; N: 8 or 16,32 or 256:16384:x2")
    add_names(grid, "--attention-type", more=f"also {', '.join(COMBINATOR_TYPES)}; repeatable")
    add(grid, "--bsz", "--seq-len", "--query-len", "--kv-len", "--dim", "--heads", "--core-dim", "--factor", type=sizes)
    add_batches(grid)
    add(grid, "--dtype", type=words, default=None, metavar="NAME[,NAME]", more="on a GPU bf16")
    add(grid, "--mode", type=words, default=None, choices=None, metavar="NAME[,NAME]")
    add(grid, "--compile", action=argparse.BooleanOptionalAction, help="run under torch.compile")
    add_causal(grid, default=None)

    measuring = parser.add_argument_group("measuring")
    add(measuring, "--device", more="with --predict-only a GPU by name or size")
    add(measuring, "--memory-limit", "--passes")
    add(measuring, "--max-seconds-per-case", more="a case that takes longer is ended")
    add_switches(measuring, None, no_time="measure memory only")

    running = parser.add_argument_group("running")
    add_switches(
        running,
        None,
        isolate="a new process for each case",
        retry="run rows again that ended as error, killed, timeout or skipped",
        dry_run="list the cases, run none",
    )
    add(running, "--workers", type=count, help="cases at the same time; default: 1")
    add(running, "--devices", type=words, metavar="0,1", help="CUDA devices, with a worker on each")
    add(running, "--dask", metavar="ADDRESS", help="a dask scheduler whose workers run the cases")
    add(running, "--plugin")
    add(running, "--output", help="folder of the results; default: results")
    pictures = "also each panel of an overview as a picture of its own, as memcheck plot draws them"
    add_switches(running, None, all_pictures=pictures)
    add(running, "--format", default=None)

    predicting = parser.add_argument_group("predicting")
    add_switches(
        predicting,
        None,
        predict_only="run nothing: a predicted row for every case",
        predict="a predicted row beside every measured one",
    )
    add_gpu_argument(predicting)


COMMANDS = {
    add_flags.__name__.replace("_", "-"): add_flags
    for add_flags in (
        *(calibrate, compare, completion, fit, gradcheck, info, mixed_precision, plot, predict, profile_attention),
        *(profile_combinator, profile_model, published, report, run, sweep),
    )
}


class Parser(argparse.ArgumentParser):
    """Ends in a UsageError of one line, which names what was probably meant.

    check: raises a UsageError for flags that do not belong together.
    """

    check: Callable[[argparse.Namespace], None] = staticmethod(lambda args: None)

    def error(self, message: str) -> NoReturn:
        # argparse writes "argument --bsz: must be at least 1".
        message = message.removeprefix("argument ").replace(": must ", " must ", 1)
        if message.startswith("unrecognized arguments: "):
            flag = message.split()[2].partition("=")[0]
            message += did_you_mean(flag, self._option_string_actions)
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(
                action, error.message + did_you_mean(str(value), map(str, action.choices or ()))
            ) from None


def words_before_script(words: Sequence[str]) -> int:
    """How many of the words come before SCRIPT or -m of `memcheck run`. Its flags but --help take a value."""
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-m", "--"):
        takes_next = words[place] not in ("-h", "--help") and "=" not in words[place]
        place += 2 if takes_next else 1
    return place


def split_help(name: str) -> tuple[str, list[str]]:
    """What the command does, and its examples."""
    description, _, examples = inspect.cleandoc(COMMANDS[name].__doc__ or "").partition("\n\n")
    return description, examples.splitlines()


def command_parser(name: str) -> Parser:
    """The parser of one command. Its help ends in the examples."""
    description, examples = split_help(name)
    parser = Parser(
        prog=f"memcheck {name}",
        description=description,
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    COMMANDS[name](parser)
    return parser


def words_of(parser: argparse.ArgumentParser, settings: dict[str, Any]) -> list[str]:
    """The words that set these flags, by their names with underscores or hyphens. False unsets a flag that has a no.

    A list is one value, with commas. A flag that collects its values is repeated for a list
    of lists, or of texts with commas.
    """
    words = []
    for name, value in settings.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            flag = f"--{name}" if value else f"--no-{name}"
            words += [flag] if value or flag in parser._option_string_actions else []
        else:
            collects = isinstance(parser._option_string_actions.get(f"--{name}"), argparse._AppendAction)
            several = isinstance(value, list) and any(isinstance(x, list) or "," in str(x) for x in value)
            values = value if collects and several else [value]
            words += [f"--{name}={','.join(map(str, x)) if isinstance(x, list | tuple) else x}" for x in values]
    return words
