"""The record of one measurement or prediction: flat, and convertible to and from a line of JSON.

Sizes are bytes. Unknown is None (null in JSON), never 0. A case that failed is a record too.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import re
import reprlib
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcheck.core import files, html
from memcheck.core.units import alive_words, few_lines, format_bytes


class Certainty(str, enum.Enum):
    """How figures are known. None in its place: there are no figures."""

    MEASURED = "measured"
    """By measuring on this device."""
    EXACT = "exact"
    """Predicted to the byte: nothing is unknown, and such predictions were equal to measurements."""
    VERIFIED = "verified"
    """Predicted by rules that were compared with measurements on such a device: on the CPU by tests, on a GPU because
    published runs have all these operators."""
    DERIVED = "derived"
    """Predicted by rules that were only read in PyTorch's sources."""

    def __str__(self) -> str:
        return self.value


FEW_PASSES = 5
# Kinds of doubts about times, and the reason in short.
TIMES = {
    "scatter": "passes scatter",
    "drift": "passes drift",
    "cold": "no pass to warm up",
    "few passes": "few passes",
    "busy": "the machine was busy",
    "shared": "the GPU was shared",
    "side by side": "several cases ran at once",
    "cut off": "the timing was cut off",
    "no time": "no time was left for timed passes",
}
# The kind of a doubt about allocations that a prediction does not know: its fields are bounds.
UNKNOWN = "unknown"


class Doubt(str):
    """Why figures may be off: a sentence, with what programs need to know of it.

    kind: UNKNOWN, one of TIMES, or "other".
    fields: the fields of the record that it is about; empty: of a doubt about times all times, else any.
    """

    kind: str
    fields: tuple[str, ...]

    def __new__(cls, sentence: str, kind: str = "other", fields: tuple[str, ...] = ()) -> Doubt:
        doubt = super().__new__(cls, sentence)
        doubt.kind, doubt.fields = kind, tuple(fields)
        return doubt

    @property
    def about_times(self) -> str | None:
        """Why times are doubtful, in a few words; None if it is not about times."""
        return TIMES.get(self.kind)

    def concerns(self, field: str) -> bool:
        """Whether it is about the times of the field, such as "forward_ms"."""
        return self.kind in TIMES and (not self.fields or field in self.fields)

    def value(self) -> dict[str, Any]:
        """The value in JSON."""
        return {"kind": self.kind, "sentence": str(self), "fields": list(self.fields)}


SCHEMA = 1
# Record field -> the bytes alive at that moment: name -> bytes.
Terms = dict[str, dict[str, int]]
R = typing.TypeVar("R", bound="Record")
T = typing.TypeVar("T")
PHASES = ("forward", "backward", "optimizer")  # Phases of a run, as far as it has them.
# The main figures: in words, and the colour of their bars.
BARS = {
    "forward_peak_bytes": ("peak forward", "forward"),
    "saved_bytes": ("kept for backward", "kept"),
    "backward_peak_bytes": ("peak backward", "backward"),
    "optimizer_peak_bytes": ("peak optimizer", "optimizer"),
}


@dataclass
class Record:
    """One case, where it ran, how it ended, and the bytes and milliseconds it took."""

    # The case.
    schema: int = SCHEMA  # Version of this format.
    source: str = "measured"  # "measured" or "predicted". Records of the two kinds are never mixed up or substituted.
    operator: str | None = None  # The contender's name in the catalog.
    bsz: int | None = None  # Batch size B.
    query_len: int | None = None  # Number of queries S.
    kv_len: int | None = None  # Number of keys T, or tokens of the state in decoding.
    dim: int | None = None  # Token dimension E.
    heads: int | None = None  # None if the operator has no heads.
    core_dim: int | None = None  # Core dimension R of softplus attention.
    factor: int | None = None  # Block length of compressed attention.
    window: int | None = None  # Newest positions that compressed attention sees as they are; None without a window.
    dtype: str | None = None  # "float32", ...
    causal: bool | None = None  # The mask that was applied; None if the operator has no such option.
    mode: str | None = None  # "train", "inference" or "decode"; of whole models "forward", "backward" or "train".
    compiled: bool | None = None  # Under torch.compile.
    # Of a whole model, whose operator is its attention.
    size: str | None = None  # Of memcheck profile-model: "tiny", ... None: it is no such model.
    feed_forward: str | None = None  # "swiglu", ...
    autocast: str | None = None  # What torch.autocast casts to; None without.
    checkpointing: bool | None = None  # Each layer keeps its input alone, and runs again in the backward.

    # Where it ran.
    device: str | None = None  # "cpu" or "cuda".
    device_index: int | None = None  # Of a CUDA device.
    device_name: str | None = None  # The driver's or the processor's name.
    device_uuid: str | None = None  # Of a CUDA device.
    device_total_bytes: int | None = None  # Memory of the device.
    device_free_bytes: int | None = None  # Memory that was free at the start.
    torch_version: str | None = None  # The torch that ran.
    memcheck_version: str | None = None  # The memcheck that ran.
    allocator: str | None = None  # Allocator settings.
    threads: int | None = None  # Threads of torch on the CPU.
    backend: str | None = None  # The implementation that really ran.
    backend_reason: str | None = None  # Why it is not the requested one.

    # How it ended.
    status: str = "ok"  # ok, oom, unsupported, error, timeout, killed or skipped.
    oom_phase: str | None = None  # "forward", "backward" or "optimizer".
    oom_requested_bytes: int | None = None  # The request that failed.
    oom_in_use_bytes: int | None = None  # What was allocated at that moment.
    reason: str | None = None  # Why the status is not ok, in words.

    backward_from: str | None = None  # The path of what the backward starts from: "output[1]".

    # What the caller holds.
    input_bytes: int | None = None  # Inputs.
    output_bytes: int | None = None  # Outputs that the forward made, and that stay alive until the step ends.
    parameter_bytes: int | None = None  # Parameters.
    optimizer_bytes: int | None = None  # State of the optimizer, such as AdamW's two moments.
    # What the operator needs.
    forward_peak_bytes: int | None = None  # Highest sum alive during the forward, with inputs and library workspaces.
    saved_bytes: int | None = None  # Made by the forward and kept, less outputs and new buffers.
    backward_peak_bytes: int | None = None  # Highest sum alive during the backward alone.
    optimizer_peak_bytes: int | None = None  # Highest sum alive during the optimizer's step after the backward.
    gradient_bytes: int | None = None  # The resulting gradients.
    workspace_bytes: int | None = None  # The operator's own scratch.
    library_workspace_bytes: int | None = None  # cuBLAS and the like.
    forward_max_allocated_bytes: int | None = None  # torch.cuda.max_memory_allocated after the forward.
    backward_max_allocated_bytes: int | None = None  # The same after the backward, without a reset in between.
    max_allocated_bytes: int | None = None  # The same after the whole step: sums of the allocator's blocks.
    # torch.cuda.memory_allocated when the forward has ended, and its outputs are alive. It counts blocks, which are as
    # large as their tensors or larger: multiples of 512 B, or a free block that was taken whole. On a CPU: tensors.
    forward_end_allocated_bytes: int | None = None
    backward_end_allocated_bytes: int | None = None  # The same when the backward has ended, before the optimizer.
    reserved_bytes: int | None = None  # Segments of the CUDA caching allocator.
    process_bytes: int | None = None  # Predicted: these and the CUDA context, which nvidia-smi shows of the process.

    # Time: median and quartiles, from passes without memory tracking.
    forward_ms: float | None = None  # Median.
    forward_ms_quartiles: tuple[float, float] | None = None  # First and third quartile.
    backward_ms: float | None = None  # Median.
    backward_ms_quartiles: tuple[float, float] | None = None  # First and third quartile.
    optimizer_ms: float | None = None  # Median.
    optimizer_ms_quartiles: tuple[float, float] | None = None  # First and third quartile.
    passes: int | None = None  # Timed passes.

    # Decoding: the state after kv_len tokens. The peaks are those of one step.
    state_bytes: int | None = None  # The whole state.
    state_bytes_per_sequence: float | None = None  # state_bytes / bsz.
    state_bytes_per_token: float | None = None  # state_bytes / (bsz * kv_len).

    # In detail.
    doubts: tuple[Doubt, ...] = ()  # Reasons why a figure may be off: kind, sentence, and the fields.
    # How the figures are known: "measured"; predicted, "exact" to the byte; "verified", by rules that were compared
    # with measurements on such a device; "derived", by rules only read in sources. None: there are no figures.
    certainty: Certainty | None = None
    kept_by_part: dict[str, int] | None = None  # Of a whole model: module -> bytes that it saved first; "": no module.
    saved_tensors: list[dict[str, Any]] | None = None  # Tensors kept for backward: shape, dtype, bytes.
    alive_at_peak: list[dict[str, Any]] | None = None  # Largest first: phase, name of what allocated it, bytes.
    over_time: dict[str, list[int]] | None = None  # Phase -> bytes alive over time, in steps of a few allocations.
    terms: Terms | None = None  # Predicted: field -> its summands, name -> bytes alive then.

    def __post_init__(self) -> None:
        if self.source == "measured":
            self.certainty = Certainty.MEASURED

    @property
    def exact(self) -> bool:
        """Whether it is a prediction whose every figure equals the measured one."""
        return self.certainty is Certainty.EXACT

    @property
    def bounds(self) -> tuple[str, ...]:
        """The fields of a prediction that are not known to the byte."""
        return tuple(sorted({field for doubt in self.doubts if doubt.kind == UNKNOWN for field in doubt.fields}))

    def note_state(self, state_bytes: int, bsz: int, tokens: int | None) -> None:
        """Fills the fields of a decoding state that holds so many tokens of each sequence."""
        self.state_bytes, self.state_bytes_per_sequence = state_bytes, state_bytes / bsz
        if tokens:
            self.state_bytes_per_token = self.state_bytes_per_sequence / tokens

    def to_json(self) -> str:
        return json.dumps(self.values())

    def values(self) -> dict[str, Any]:
        """The fields by name, as JSON has them."""
        return {**dataclasses.asdict(self), "doubts": [doubt.value() for doubt in self.doubts]}

    @property
    def peaks(self) -> dict[str, int]:
        """Phase -> its peak, of the phases whose peak is known."""
        peaks = {phase: getattr(self, f"{phase}_peak_bytes") for phase in PHASES}
        return {phase: size for phase, size in peaks.items() if size is not None}

    def headline(self) -> str:
        """ "Measured on cpu: the peak is 107 MiB, in the backward." """
        how = "Predicted for" if self.source == "predicted" else "Measured on"
        place = f"{self.operator}. " if self.operator else ""
        place += f"{how} {self.device_name or self.device}"
        if self.status != "ok":
            asked, used, more = self.oom_requested_bytes, self.oom_in_use_bytes, self.reason or ""
            if self.oom_phase is not None and asked is not None and used is not None:
                more = f"{format_bytes(asked)} requested, {format_bytes(used)} in use"
            phase = f" in the {self.oom_phase}" if self.oom_phase else ""
            status = "out of memory" if self.status == "oom" else self.status
            return sentence(f"{place}: {status}{phase}{f': {more}' if more else ''}")
        if not (peaks := self.peaks):
            return f"{place}."
        highest = max(peaks, key=lambda phase: peaks[phase])
        return f"{place}: the peak is {format_bytes(peaks[highest])}, in the {highest}."

    def alive_then(self) -> tuple[str, dict[str, int]] | None:
        """When, and the bytes alive then by name: at the highest peak, or when there was no room. None if unknown."""
        peaks, terms = self.peaks, self.terms or {}
        highest = max(peaks, key=lambda phase: peaks[phase], default="forward")
        if self.status == "oom" and "oom_in_use_bytes" in terms:
            return "when there was no room", terms["oom_in_use_bytes"]
        if rows := [row for row in self.alive_at_peak or () if row.get("phase") == highest]:
            counts, sizes = Counter(row["name"] for row in rows), Counter[str]()
            for row in rows:
                count = counts[row["name"]]
                sizes[f"{row['name']} ({count} tensors)" if count > 1 else row["name"]] += row["bytes"]
            return f"at the peak of the {highest}", sizes
        if self.status == "ok" and f"{highest}_peak_bytes" in terms:
            return f"at the peak of the {highest}", terms[f"{highest}_peak_bytes"]
        return None

    def __repr__(self) -> str:
        """The result in a few lines; dataclasses.asdict() has every field."""
        sizes = [f"{name} {format_bytes(size)}" for name, _, size in self.bars()]
        alive = self.alive_then()
        doubts = [f"Doubt: {doubt}." for doubt in self.doubts[:2]]
        doubts += [f"{len(self.doubts) - 2} more doubts."] if len(self.doubts) > 2 else []
        return few_lines(
            [
                self.headline(),
                *([f"{sizes[0][0].upper()}{', '.join(sizes)[1:]}."] if sizes else []),
                *([f"Alive {alive[0]}: {alive_words(alive[1].items())}."] if alive else []),
                *([start] if (start := self.start_sentence()) else []),
                *doubts,
            ]
        )

    def start_sentence(self) -> str:
        """ "Backward from output[1]."; "" if there is but one output."""
        return "" if self.backward_from in (None, "output") else f"Backward from {self.backward_from}."

    def bars(self) -> list[tuple[str, str, int]]:
        """The main figures that are known: words, the kind of bytes, and bytes."""
        return [(*name, size) for field, name in BARS.items() if (size := getattr(self, field)) is not None]

    def _repr_html_(self) -> str:
        return html.html_of(self)

    @classmethod
    def from_json(cls: type[R], line: str) -> R:
        """The record of one `line` of JSON; fields this version does not know are dropped.

        ValueError: it is no JSON object, its schema is another, or a field has a value of another type.
        """
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        schema = values.get("schema", SCHEMA)
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r}, and this memcheck reads {SCHEMA}")
        return of_values(cls, values)


def sentence(text: str) -> str:
    return text if text.endswith((".", "!")) else f"{text}."


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def of_values(cls: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass of JSON values, without unknown names. ValueError: a value is missing, or of another type."""
    kinds = field_types(cls)  # type: ignore[arg-type]  # dataclasses have no hash, but their classes do
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"it has no {field.name}")
    return cls(**{name: typed(name, values[name], kind) for name, kind in kinds.items() if name in values})


SURROGATE = re.compile(r"[\ud800-\udfff]")
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    tuple[float, float]: "two numbers",
    tuple: "a list",
    list: "a list",
    dict: "an object",
}


def typed(name: str, value: Any, kind: Any) -> Any:
    """Converts a JSON value to the field's type. ValueError if it has another type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else typed(name, value, parts[0])  # Every union here is with None.
    if origin is tuple and isinstance(value, list):
        each = [parts[0]] * len(value) if parts[-1] is ... else parts
        if len(each) == len(value):
            return tuple(typed(name, item, part) for item, part in zip(value, each, strict=True))
    elif origin is list and isinstance(value, list):
        return [typed(name, item, parts[0]) for item in value]
    elif kind is Doubt and isinstance(value, str | dict):  # 0.2 wrote the sentence alone.
        doubt = value if isinstance(value, dict) else {"sentence": value}
        fields = typed(name, doubt.get("fields", []), tuple[str, ...])
        return Doubt(typed(name, doubt.get("sentence"), str), typed(name, doubt.get("kind", "other"), str), fields)
    elif origin is dict and isinstance(value, dict):
        return {key: typed(f"{name}.{key}", item, parts[1]) for key, item in value.items()}
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return of_values(kind, value)
    elif kind is Certainty and value in list(kind):
        return kind(value)
    elif kind is Any or is_a(value, kind):
        return value
    raise ValueError(f"{name} must be {WORDS.get(kind, WORDS.get(origin, 'an object'))}, got {reprlib.repr(value)}")


def is_a(value: Any, kind: Any) -> bool:
    """True if the JSON value has the type. A bool is not a number, and numbers must be finite."""
    if kind is int:
        return type(value) is int
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is str:  # JSON can hold lone surrogates, which UTF-8 cannot encode.
        return isinstance(value, str) and not SURROGATE.search(value)
    return kind is bool and isinstance(value, bool)


def write_csv(records: Iterable[Record], path: Path) -> None:
    import pandas as pd

    files.write_text(path, pd.DataFrame([dataclasses.asdict(record) for record in records]).to_csv(index=False))
