"""Options that commands share, by what they are about. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from memcheck.core import converters, devices
from memcheck.core.converters import count, names, sizes, switch
from memcheck.core.errors import UsageError
from memcheck.core.options import Option, check_needs, convert_some, flags_of, named, option, options_of
from memcheck.core.ranks import KINDS, Ranks
from memcheck.core.step import Place, Step, check_enable_grad

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

# Groups of flags in help. Models do not take the options of operators, nor operators those of models.
OPERATORS = "operators: of sizes with several values every combination is a case; N: 8 or 16,32 or 256:16384:x2"
MODELS = "models: of --model and --hf-config"
MEASURING, PREDICTING, RUNNING = "measuring", "predicting", "running"


def of_gpus(name: str) -> str:
    return f"default: {DEFAULT_SIZES[name]}, in runs on a GPU {GPU_SIZES[name]}"


def grouped(group: str, options: dict[str, Option]) -> dict[str, Option]:
    """The options, in this group of the help."""
    return {name: dataclasses.replace(option, group=group) for name, option in options.items()}


class Request:
    """What a command or a function is asked for. Its options are attributes of a request.

    A subclass has the options of its base, those that it `takes`, and its own fields, which are in its `group` of the
    help. ones: lists that may have one value only. Of the help: forms of the usage, the options that it lists first,
    and what to say of_strangers, options that the command does not have.
    """

    options: ClassVar[dict[str, Option]] = {}
    takes: ClassVar[Sequence[dict[str, Option]]] = ()
    group: ClassVar[str | None] = None
    ones: ClassVar[Sequence[str]] = ()
    forms: ClassVar[Sequence[str]] = ("[options]",)
    first: ClassVar[Sequence[str]] = ()
    of_strangers: ClassVar[str] = ""
    words: list[str] | None = None  # The command as it was typed.
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls) -> None:
        mine = vars(cls)
        fields = {name: value for name, value in mine.items() if isinstance(value, dataclasses.Field)}
        own = {name: field.metadata["option"] for name, field in fields.items()}
        own = {name: dataclasses.replace(it, group=it.group or mine.get("group")) for name, it in own.items()}
        cls.options = dict(cls.options)
        for part in (*mine.get("takes", ()), own):
            cls.options.update(part)

    def __init__(self, **given: Any) -> None:
        """given: the options; None is one that is not given. UsageError: a rule is broken."""
        self.asked = convert_some(type(self), {name: value for name, value in given.items() if value is not None})
        vars(self).update({name: option.default for name, option in self.options.items()} | self.asked)
        for name in self.ones:
            self.single(name, "here, as memcheck sweep takes several")
        self.check()

    def check(self) -> None:
        """UsageError: the options do not fit together."""

    def before_torch(self) -> None:
        """Does what must be done before torch is imported."""

    def given(self, name: str) -> bool:
        """Whether the request has the option, with another value than its default."""
        return name in self.asked and getattr(self, name) != self.options[name].default

    def single(self, name: str, whose: str) -> Any:
        """The option's only value. UsageError: it has several. whose: what takes only one."""
        given = getattr(self, name)
        if given is not None and len(given) > 1:
            raise UsageError(f"{named(name)} must be a single value {whose}, got {len(given)}")
        return given[0] if given else None


FORMAT = {"format": Option("table", "format of stdout", choices=("table", "json"))}
TABLE_FORMAT = {"format": Option("table", "format of stdout", choices=REPORT_FORMATS)}
DOUBTS = {"doubts": Option(False, "every doubt about a figure, below the table", switch)}
PLUGIN = {
    "plugin": Option(
        None,
        "a file or module that registers your operators (memcheck.bench.catalog.register)",
        converters.texts,
        repeatable=True,
        metavar="FILE.py",
    )
}
MODE = {
    "mode": Option(
        "train", "train: forward and backward; inference: forward; decode: one step from a state", choices=MODES
    )
}
COMPILE = grouped(
    OPERATORS, {"compile": Option(False, "run under torch.compile, which compiles before the measurement", switch)}
)
# Of cases of operators, or of a model. Each may have several values.
SIZES = {
    "bsz": Option(None, f"batch size B; {of_gpus('bsz')}", sizes),
    "seq_len": Option(
        None,
        "both lengths, S and T, or in --mode decode tokens of the state; default: 1024, in runs of several lengths 256 "
        f"to 4096, on a GPU {GPU_LENGTHS[0]} to {GPU_LENGTHS[-1]}",
        sizes,
    ),
    "dtype": Option(
        None,
        "fp32, bf16, fp16, fp64, or torch's names; default: fp32, in runs on a GPU bf16; of models that of parameters "
        "and floating-point inputs, by default as the model is built",
        converters.dtype_name,
    ),
}
OF_OPERATORS = grouped(
    OPERATORS,
    {
        "attention_type": Option(
            None,
            f"{', '.join(ATTENTION_TYPES)}, or an operator of --plugin; predict, fit and sweep also take "
            f"{', '.join(COMBINATOR_TYPES)}; default: {','.join(DEFAULT_TYPES)}, of predict naive",
            names,
            repeatable=True,
        ),
        "dim": Option(None, f"token dimension E; {of_gpus('dim')}", sizes),
        "heads": Option(None, f"number of heads H, for operators that have heads; {of_gpus('heads')}", sizes),
        "core_dim": Option(None, "core dimension of softplus attention; default: --dim", sizes),
        "factor": Option(None, "positions per block of compressed attention; default: 8", sizes),
        "window": Option(
            None, "newest positions that compressed attention sees as they are; default: none of them", sizes
        ),
        "causal": Option(True, "each query sees only the keys up to its own position", switch),
    },
)
# Of cases whose numbers of queries and keys may differ.
TWO_LENGTHS = grouped(
    OPERATORS,
    {
        "query_len": Option(None, "number of queries S; default: --kv-len", sizes),
        "kv_len": Option(
            None, "number of keys T, or tokens of the state in --mode decode; default: --query-len", sizes
        ),
    },
)
# Of what is measured on this machine.
HERE = {"device": Option(None, "cpu, cuda or cuda:1; default: cuda if there is a GPU", converters.text)}
MEASURED = {**HERE, **flags_of(Place, "memory_limit")}
TIMED = grouped(
    MEASURING,
    {
        "passes": Option(
            None, "timed passes; default: 10, or as many as fit into 3 s, of whole models into 10 s", count
        ),
        "no_time": Option(False, "measure memory only", switch),
    },
)


class Predicting(Request):
    """A request that may predict for a device that need not be here."""

    takes: ClassVar[Sequence[dict[str, Option]]] = (flags_of(Place, "device", "memory_limit"),)

    device_from_this_gpu: int | None = option(
        None,
        "this machine's GPU N (0), with the memory that is free on it now",
        converters.gpu_index,
        const=0,
        metavar="N",
    )

    def place(self) -> Place:
        """The place to predict for: by default this machine's GPU, else its CPU."""
        given = {name: getattr(self, name) for name in options_of(Place) if name in self.options and name != "device"}
        device = self.device
        if self.device_from_this_gpu is not None:
            if device is not None:
                raise UsageError(f"{named('device')} {device} and {named('device_from_this_gpu')} exclude each other")
            return Place(devices.this_gpu(self.device_from_this_gpu), **given)
        return Place(device, **given).resolved()


class ModelStep(Predicting):
    """A request for a model, and a step of it, at a place to predict for.

    alone: further options that operators do not take.
    """

    alone: ClassVar[tuple[str, ...]] = ()
    group = MODELS
    takes: ClassVar[Sequence[dict[str, Option]]] = (grouped(MODELS, flags_of(Step) | flags_of(Ranks)),)

    model: str | None = option(
        None,
        "a function that returns (model, inputs); its parameters bsz and seq_len get --bsz and --seq-len",
        converters.reference,
        exclusive="source",
    )
    hf_config: Path | None = option(
        None,
        "a config.json of Hugging Face transformers (pip install transformers); nothing is downloaded",
        converters.config_file,
        exclusive="source",
    )
    attention: str | None = option(
        None,
        "attention of a model of --hf-config, with its memcheck_factor and memcheck_window; default: sdpa if it has it",
        choices=("sdpa", "eager", "memcheck_compressed", "memcheck_linear", "memcheck_softplus"),
    )
    traceback: bool = option(False, "the whole traceback of an error in the model's code", switch)

    @property
    def source(self) -> str | None:
        """The option that names the model; None: the request is for an operator."""
        return "model" if self.model else "hf_config" if self.hf_config else None

    @property
    def ranks(self) -> Ranks | None:
        """How the model is split over processes."""
        over = {name: size for name in KINDS if (size := getattr(self, name))}
        return Ranks(**over, rank=self.rank) if over else None

    def check(self) -> None:
        for name in filter(self.given, self.options):
            group = MODELS if name in self.alone else self.options[name].group
            alone = named(f"{name}=False" if getattr(self, name) is False else name)
            if self.source and group == OPERATORS:
                raise UsageError(f"{alone} is for operators, not for {named(self.source)}")
            if not self.source and group == MODELS:
                raise UsageError(f"{alone} needs {named('model')} or {named('hf_config')}")
        mode = getattr(self, "mode", "train")
        if self.source and mode == "decode":
            raise UsageError(f"{named('mode')} decode is for operators, not for {named(self.source)}")
        if "rank" in self.asked and self.ranks is None:
            splits = f"{named('fsdp')}, {named('tp')} or {named('ddp')}"
            raise UsageError(f"{named('rank')} {self.rank} needs {splits}")
        if self.attention and not self.hf_config:
            rule = f"needs {named('hf_config')}; a factory of {named('model')} chooses its own"
            raise UsageError(f"{named('attention')} {rule}")
        check_needs(self, backward=mode != "inference", optimizer=self.optimizer != "none")
        check_enable_grad(self.enable_grad, mode != "inference")
        if self.hf_config and importlib.util.find_spec("transformers") is None:
            raise UsageError(f"{named('hf_config')} needs transformers: pip install transformers")


class PredictedModel(ModelStep):
    """A request for a prediction of an operator or a model."""

    forms: ClassVar[Sequence[str]] = (
        "--model FILE.py:FUNCTION [options]",
        "--hf-config FILE [options]",
        "--attention-type NAME [options]",
    )
    first: ClassVar[Sequence[str]] = (
        *("model", "hf_config", "attention_type", "device", "bsz", "seq_len", "mode", "dtype", "optimizer"),
        *("memory_limit", "fail_on_oom"),
    )
    takes: ClassVar[Sequence[dict[str, Option]]] = (
        MODE,
        PLUGIN,
        SIZES,
        OF_OPERATORS,
        DOUBTS,
        FORMAT,
        flags_of(Place),
        flags_of(Step, "compile"),
    )

    probes: Path | None = option(
        None,
        "a table of what operators take on a CPU, which the prediction is for; if it is this one, what the table lacks "
        "is run and added",
        converters.file,
        group=MODELS,
    )
    no_changes: bool = option(False, "do not predict what would need less, or allow more", switch)
    fail_on_oom: bool = option(False, "exit code 3 unless all of it is predicted to fit", switch)

    def before_torch(self) -> None:
        """A command for a GPU of the catalog, or of a size, is itself the process that simulates it."""
        is_here = self.device is None or self.device.partition(":")[0] in ("cpu", "cuda")
        if is_here or self.torch_version is not None or "torch" in sys.modules:
            return
        from memcheck.predict.process import simulate_here

        simulate_here(self.place().for_device)
