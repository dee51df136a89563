"""Options that commands share, by what they are about. Nothing here imports torch."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from typing_extensions import dataclass_transform

from memcheck.core import converters
from memcheck.core.converters import OPTIMIZERS, count, names, sizes, switch
from memcheck.core.devices import DEVICES, this_gpu
from memcheck.core.errors import UsageError
from memcheck.core.options import Request, named, option, options_of, same_option
from memcheck.core.place import Place
from memcheck.core.ranks import KINDS, Ranks
from memcheck.core.step import Step

# Names that help texts list. The modules that define them import torch; a test compares them.
ATTENTION_TYPES = (
    *("naive", "naive-compiled", "softmax", "softmax/math", "softmax/flash", "softmax/efficient", "softmax/cudnn"),
    *("flex", "softplus", "linear", "linear-causal", "linear-cumsum", "compressed"),
    *("memcheck-pyt/naive", "memcheck-pyt/softmax", "memcheck-pyt/softplus", "cs336/naive"),
)
COMBINATOR_TYPES = ("combinator", "combinator-low-memory", "memcheck-pyt/combinator")
DECODER_TYPES = ("naive", "softmax", "linear", "compressed", "softplus")  # Of memcheck.nn.Decoder.
MODES = ("train", "inference", "decode")
REPORT_FORMATS = ("table", "markdown", "csv", "latex", "json")
# The defaults of the commands that compare attentions.
DEFAULT_TYPES = ["naive", "softmax", "softplus", "linear-causal", "compressed"]
DEFAULT_SIZES = {"bsz": 1, "dim": 256, "heads": 4}
# On a GPU, the sizes of a layer of a language model.
GPU_SIZES = {"bsz": 4, "dim": 2048, "heads": 16}
GPU_LENGTHS = [512, 1024, 2048, 4096, 8192]
GPU_DTYPE = "bfloat16"
DTYPE_OF_MODELS = "dtype of parameters and floating-point inputs; default: as the model is built"
LAYOUTS = ("padded", "packed")

R = TypeVar("R", bound=Request)
of_step, of_place, of_ranks = (functools.partial(same_option, kind) for kind in (Step, Place, Ranks))


@dataclass_transform(kw_only_default=True, frozen_default=True)
def request(**changes: str | dict[str, Any]) -> Callable[[type[R]], type[R]]:
    """Makes a class the frozen dataclass of a request.

    changes: of options that it inherits: words that its help adds, or changes as of same_option.
    """

    def decorate(kind: type[R]) -> type[R]:
        holders = [base for base in kind.__mro__[1:] if is_dataclass(base)]
        for name, change in changes.items():
            holder = next(base for base in holders if name in options_of(base))
            how = {"more": change} if isinstance(change, str) else change
            setattr(kind, name, same_option(holder, name, **how))
            kind.__annotations__[name] = Any
        return dataclass(frozen=True, kw_only=True)(kind)

    return decorate


@request()
class Printed(Request):
    """A request whose answer is printed."""

    format: str = option("table", "format of stdout; default: table", choices=("table", "json"))


@request()
class Detailed(Printed):
    doubts: bool = option(False, "every doubt about a figure, below the table", switch)


@request()
class Plugins(Request):
    plugin: list[str] | None = option(
        None,
        "a file or module that registers your operators (memcheck.bench.catalog.register); repeatable",
        converters.texts,
        repeatable=True,
        metavar="FILE.py",
    )


@request()
class Modes(Request):
    mode: Any = option(
        "train",
        "train: forward and backward; inference: forward; decode: one step from a state; default: train",
        choices=MODES,
    )


@request()
class Operators(Plugins, Modes):
    """A request for cases of operators of the catalog. Each option may have several values."""

    attention_type: list[str] | None = option(
        None, f"{', '.join(ATTENTION_TYPES)}, or an operator of --plugin", names, repeatable=True
    )
    bsz: list[int] | None = option(None, "batch size B", sizes)
    dim: list[int] | None = option(None, "token dimension E", sizes)
    heads: list[int] | None = option(None, "number of heads H, for operators that have heads", sizes)
    seq_len: list[int] | None = option(None, "both lengths, S and T", sizes)
    lengths: list[list[int]] | None = option(
        None,
        "sequences of these lengths, as a padded and as a packed batch, in place of --bsz and lengths; repeatable",
        converters.batches,
        repeatable=True,
    )
    packed: bool | None = option(
        None,
        "with --lengths: only the batch that has the sequences one behind the other",
        switch,
        only_on=True,
        exclusive="layouts",
    )
    padded: bool | None = option(
        None,
        "with --lengths: only the batch that has the sequences each padded to the longest",
        switch,
        only_on=True,
        exclusive="layouts",
    )
    core_dim: list[int] | None = option(None, "core dimension of softplus attention; default: --dim", sizes)
    factor: list[int] | None = option(None, "positions per block of compressed attention; default: 8", sizes)
    window: list[int] | None = option(
        None, "newest positions that compressed attention sees as they are; default: none of them", sizes
    )
    causal: bool | None = option(
        None, "each query sees only the keys up to its own position; default: --causal", switch
    )
    dtype: Any = option(None, "fp32, bf16, fp16, fp64, or torch's names; default: fp32", converters.dtype_name)

    def single(self, name: str, whose: str) -> int | None:
        """The option's only value. UsageError: it has several. whose: what takes only one."""
        given = getattr(self, name)
        if given is not None and len(given) > 1:
            raise UsageError(f"{named(name)} must be a single value {whose}, got {len(given)}")
        return given[0] if given else None


@request()
class OfTwoLengths(Operators):
    """A request for cases whose numbers of queries and keys may differ."""

    query_len: list[int] | None = option(None, "number of queries S; default: --kv-len", sizes)
    kv_len: list[int] | None = option(
        None, "number of keys T, or tokens of the state in --mode decode; default: --query-len", sizes
    )


@request()
class OnThisMachine(Request):
    """A request that measures."""

    device: str | None = option(None, "cpu, cuda or cuda:1; default: cuda if there is a GPU", converters.text)
    memory_limit: int | None = of_place(
        "memory_limit", help="out of memory above this; units: B, KiB, MiB, GiB, KB, MB, GB"
    )


@request()
class Timed(OnThisMachine):
    passes: int | None = option(None, "timed passes; default: 10, or as many as fit into 3 s", count)
    no_time: bool = option(False, "measure memory only", switch)


@request()
class Predicting(Request):
    """A request that may predict for a device that need not be here."""

    device: str | None = of_place(
        "device",
        help=f"{', '.join(DEVICES)}, cpu, or a size such as 40GiB; default: this machine's GPU, else its CPU",
        convert=converters.text,
        metavar="NAME",
    )
    device_from_this_gpu: int | None = option(
        None,
        "this machine's GPU N (0), with the memory that is free on it now",
        converters.gpu_index,
        nargs="?",
        const=0,
        metavar="N",
    )
    memory_limit: int | None = of_place("memory_limit", help="a limit below the device's memory")

    def place(self) -> Place:
        """The place to predict for: by default this machine's GPU, else its CPU."""
        given: Any = {name: getattr(self, name, None) for name in options_of(Place) if name not in ("device", "ranks")}
        device = self.device
        if self.device_from_this_gpu is not None:
            if device is not None:
                raise UsageError(f"{named('device')} {device} and {named('device_from_this_gpu')} exclude each other")
            return Place(this_gpu(self.device_from_this_gpu), **given)
        if device is None:
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Place(device, **given).resolved()


MODELS, OUTPUT = "models", "output"


@request()
class ModelStep(Request):
    """A request for a model, and a step of it.

    ALONE: further options that operators do not take.
    """

    ALONE: ClassVar[tuple[str, ...]] = ("calibration", "no_changes", "doubts")
    groups: ClassVar[dict[str, str]] = {MODELS: "any model, in place of an operator of --attention-type"}

    model: str | None = option(
        None,
        "a function that returns (model, inputs); its parameters bsz and seq_len get --bsz and --seq-len",
        converters.reference,
        group=MODELS,
        exclusive="source",
    )
    hf_config: Path | None = option(
        None,
        "a config.json of Hugging Face transformers (pip install transformers); nothing is downloaded",
        converters.file,
        group=MODELS,
        exclusive="source",
    )
    optimizer: str | None = of_step(
        "optimizer",
        help=f"{', '.join(OPTIMIZERS)}, or a function that makes one, which gets the model if its first parameter is "
        "named model or annotated as a Module, else the model's parameters; default: adamw, whose step follows the "
        "backward",
        convert=converters.optimizer_name,
        group=MODELS,
        metavar="NAME|FILE.py:NAME",
    )
    autocast: str | None = of_step(
        "autocast",
        help="products in bf16 (if no name is given) or fp16, with parameters as they are",
        convert=converters.autocast_name,
        group=MODELS,
        nargs="?",
        const="bf16",
        metavar="bf16|fp16",
    )
    checkpointing: bool = of_step("checkpointing", group=MODELS)
    attention: str | None = option(
        None,
        "attention of a model of --hf-config, with its memcheck_factor and memcheck_window; default: sdpa if it has it",
        choices=("sdpa", "eager", "memcheck_compressed", "memcheck_linear", "memcheck_softplus"),
        group=MODELS,
    )
    loss: str | None = of_step(
        "loss",
        help="a function of the model's output; default: output.loss, else the only scalar, else every output",
        convert=converters.reference,
        group=MODELS,
    )
    keep_outputs: bool = of_step("keep_outputs", group=MODELS)
    steps: int | None = of_step("steps", group=MODELS)
    accumulate: int = of_step("accumulate", more="default: 1", group=MODELS)
    clip_grad_norm: float | None = of_step("clip_grad_norm", group=MODELS)
    set_to_none: bool = of_step("set_to_none", group=MODELS)
    build_on: str | None = option(
        None,
        "cpu: build the model of --model with real tensors; default: meta, floating-point tensors without data",
        choices=("meta", "cpu"),
        group=MODELS,
    )
    fsdp: int | None = of_ranks("fsdp", convert=count, group=MODELS, exclusive="splits")
    tp: int | None = of_ranks("tp", convert=count, group=MODELS, exclusive="splits")
    ddp: int | None = of_ranks("ddp", convert=count, group=MODELS, exclusive="splits")
    rank: int | None = of_ranks("rank", default=None, convert=converters.number, group=MODELS)
    traceback: bool = option(False, "the whole traceback of an error in the model's code", switch, group=MODELS)

    @property
    def source(self) -> str | None:
        """The option that names the model; None: the request is for an operator."""
        return "model" if self.model else "hf_config" if self.hf_config else None

    @property
    def ranks(self) -> Ranks | None:
        """How the model is split over processes."""
        over = {name: size for name in KINDS if (size := getattr(self, name))}
        return Ranks(**over, rank=self.rank or 0) if over else None

    def check(self) -> None:
        for name in ("model", "loss", "optimizer"):
            file = (getattr(self, name) or "").rpartition(":")[0]
            if file.endswith(".py") and not Path(file).is_file():
                raise UsageError(f"{named(name)}: there is no file {file}")
        for name in ("hf_config", "calibration"):
            if self.given(name) and not getattr(self, name).is_file():
                raise UsageError(f"{named(name)}: there is no file {getattr(self, name)}")
        of_models = [name for name in (*options_of(ModelStep), *self.ALONE) if name not in ("model", "hf_config")]
        foreign = OF_OPERATORS if self.source else of_models
        if wrong := next(filter(self.given, foreign), None):
            alone = named(f"{wrong}=False" if getattr(self, wrong) is False else wrong)
            needs = f"needs {named('model')} or {named('hf_config')}"
            raise UsageError(f"{alone} {f'is for operators, not for {named(self.source)}' if self.source else needs}")
        mode = getattr(self, "mode", "train")
        if self.source and mode == "decode" and not (self.hf_config and "kv_heads" in options_of(self)):
            raise UsageError(f"{named('mode')} decode is for operators, not for {named(self.source)}")
        if self.rank is not None and self.ranks is None:
            splits = f"{named('fsdp')}, {named('tp')} or {named('ddp')}"
            raise UsageError(f"{named('rank')} {self.rank} needs {splits}")
        if self.attention and not self.hf_config:
            rule = f"needs {named('hf_config')}; a factory of {named('model')} chooses its own"
            raise UsageError(f"{named('attention')} {rule}")
        if mode == "inference":
            backward = (
                "optimizer",
                "checkpointing",
                "loss",
                "keep_outputs",
                "accumulate",
                "clip_grad_norm",
                "dense_grad",
            )
            for name in filter(self.given, backward):
                if getattr(self, name) != "none":
                    words = named("keep_outputs=False" if name == "keep_outputs" else name)
                    raise UsageError(f"{words} needs a backward, which {named('mode')} inference has not")
        if self.clip_grad_norm is not None and self.optimizer == "none":
            raise UsageError(f"{named('clip_grad_norm')} needs an optimizer, got {named('optimizer')} none")
        if self.hf_config and importlib.util.find_spec("transformers") is None:
            raise UsageError(f"{named('hf_config')} needs transformers: pip install transformers")


# Options that models do not take.
OF_OPERATORS = (
    *("attention_type", "query_len", "kv_len", "lengths", "packed", "padded", "dim", "heads", "core_dim", "factor"),
    *("window", "causal", "compile", "plot", "explain"),
)


@request(doubts={"group": OUTPUT})
class PredictedModel(ModelStep, Predicting, Detailed):
    """A request for a prediction that may be of a model."""

    torch_version: tuple[int, int] | None = of_place("torch_version", metavar="2.13")
    calibration: Path | None = option(
        None,
        "a table of memcheck calibrate; the prediction is for the CPU, threads and torch that wrote it",
        converters.file,
        group=OUTPUT,
    )
    no_changes: bool = option(False, "do not predict what would need less, or allow more", switch, group=OUTPUT)
    fail_on_oom: bool = option(False, "exit code 3 unless all of it is predicted to fit", switch)

    def check(self) -> None:
        super().check()
        if self.calibration and self.device not in (None, "cpu"):
            raise UsageError(f"{named('calibration')} is of a CPU, and {named('device')} {self.device} is none")
        if self.calibration and self.torch_version:
            rule = f"leave out {named('torch_version')}"
            raise UsageError(f"{named('calibration')} is of the torch that wrote it: {rule}")
