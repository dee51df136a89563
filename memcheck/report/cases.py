"""Cases: the settings of records as text, selection by settings, and measurements matched with their predictions."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from memcheck.core import devices, units
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.record import BARS, PHASES, Record

R = TypeVar("R", bound=Record)
# size, feed_forward, autocast and checkpointing are those of whole models.
CASE_FIELDS = (
    *("operator", "size", "bsz", "query_len", "kv_len", "dim", "heads", "core_dim", "factor", "window"),
    *("dtype", "causal", "mode", "compiled", "feed_forward", "autocast", "checkpointing"),
)
WORDS = {
    "bsz": "batch {}",
    "query_len": "S {}",
    "kv_len": "T {}",
    "dim": "dim {}",
    "heads": "{} heads",
    "core_dim": "core dim {}",
    "factor": "factor {}",
    "window": "window {}",
    "autocast": "autocast {}",
}
YES_AND_NO = {
    "causal": ("causal", "not causal"),
    "compiled": ("compiled", "not compiled"),
    "checkpointing": ("activation checkpoints", "no activation checkpoints"),
}
# Fields of a record in plain words, in tables and sentences.
FIELD_WORDS = {
    **{field: words for field, (words, _) in BARS.items()},
    "forward_max_allocated_bytes": "max allocated, forward",
    "backward_max_allocated_bytes": "max allocated, backward",
    **{f"{name}_bytes": f"{name}s" for name in ("input", "parameter", "gradient", "buffer")},
    **{
        f"{name}_bytes": name.replace("_", " ")
        for name in ("state", "reserved", "output", "optimizer", "workspace", "library_workspace", "peak")
    },
}
# Sizes that only some operators have. If every operator has one value, they do not distinguish operators.
OWN_SIZES = ("heads", "core_dim", "factor", "window", "causal")
NEEDS = ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes")  # The main figures.


def is_model(record: Record) -> bool:
    """Whether it is a record of memcheck profile-model."""
    return record.size is not None


def models_among(records: Sequence[Record]) -> list[Record]:
    """The records of whole models."""
    return [record for record in records if is_model(record)]


def operators_among(records: Sequence[Record]) -> list[Record]:
    """The records of operators and other callables."""
    return [record for record in records if not is_model(record)]


def attention(record: Record) -> str:
    """The attention's name; whole models use the causal form of linear attention."""
    return "linear (causal)" if record.operator == "linear" else str(record.operator)


def has_sizes(record: Record) -> bool:
    """Whether the record is a case of the catalog; any other callable has only a name, from memcheck.write_record."""
    return record.query_len is not None


def case_of(record: Record) -> tuple[Any, ...]:
    """The settings that make a case; the name alone of a callable that is no case of the catalog."""
    return tuple(getattr(record, field, None) for field in CASE_FIELDS) if has_sizes(record) else (record.operator,)


def place_of(record: Record) -> str | None:
    """ "cpu", or "cuda:1"."""
    return record.device if record.device_index is None else f"{record.device}:{record.device_index}"


def case_and_place(record: Record) -> tuple[Any, ...]:
    """The key under which a later record replaces this one: the case, the device, and whether it was measured."""
    return case_of(record), place_of(record), record.device_name, record.source


def values_in_order(records: Iterable[Any], field: str) -> list[Any]:
    """The known values of a field, each once."""
    return [value for value in dict.fromkeys(getattr(record, field, None) for record in records) if value is not None]


def values_of(records: Iterable[Any], field: str) -> set[Any]:
    return set(values_in_order(records, field))


def varying(records: Sequence[Record], fields: Sequence[str] = CASE_FIELDS) -> list[str]:
    """Fields with more than one value. A field that some operators lack does not count as varying for that reason."""
    return [field for field in fields if len(values_of(records, field)) > 1]


def describe(record: Record, fields: Sequence[str]) -> str:
    """Describes a case: "softplus, S 512, T 512, dim 64"; one length if S and T are equal; or a callable's name."""
    words: list[str] = []
    for name in fields if has_sizes(record) else {"operator"} & set(fields):
        value = getattr(record, name, None)
        if value is None or (name == "core_dim" and value == record.dim):
            continue
        if name in ("compiled", "checkpointing") and not value:
            continue
        if name == "kv_len" and value == record.query_len and "query_len" in fields:
            words[-1] = f"S = T = {value}"
        elif name in YES_AND_NO:
            words.append(YES_AND_NO[name][0 if value else 1])
        else:
            words.append(WORDS.get(name, "{}").format(value))
    if record.source == "predicted":
        words.append("predicted")
    return ", ".join(words)


def count_of(records: Sequence[Any]) -> str:
    return "1 case" if len(records) == 1 else f"{len(records)} cases"


def common_case(records: Sequence[Any]) -> str:
    """The settings that all records share: "cpu, float32, batch 1, dim 256, 4 heads, causal, train"."""
    parts = []
    for name in ("device", "device_name", "dtype", "bsz", "dim", "heads", "core_dim", "factor", "window", "mode"):
        values = values_of(records, name)
        if len(values) == 1 and (name != "core_dim" or values != {record.dim for record in records}):
            parts.append(WORDS.get(name, "{}").format(values.pop()))
    if len(causal := values_of(records, "causal")) == 1:
        parts.insert(-1, YES_AND_NO["causal"][0 if causal.pop() else 1])
    if {getattr(record, "source", None) for record in records} == {"predicted"}:
        parts.append("predicted")
    return ", ".join(parts)


def phases_of(record: Record) -> tuple[str, ...]:
    """The phases that the case runs."""
    if record.mode not in ("train", "backward"):
        return PHASES[:1]
    steps = is_model(record) or record.optimizer_peak_bytes is not None
    return PHASES if steps and record.mode == "train" else PHASES[:2]


def need(record: Record) -> int | None:
    """The highest peak of all phases of the case. None if one of them is unknown."""
    sizes = [getattr(record, f"{phase}_peak_bytes") for phase in phases_of(record)]
    return None if None in sizes else max(sizes)


def predicted_need(record: Record) -> int | None:
    """The highest peak of all phases, predicted from the shapes alone. None if a phase is not predicted."""
    terms = [(record.terms or {}).get(f"{phase}_peak_bytes") for phase in phases_of(record)]
    return None if None in terms else max(sum(named.values()) for named in terms if named is not None)


def size_of(record: Record) -> int:
    """The product of the sizes, to order cases by."""
    return math.prod(getattr(record, name) or 1 for name in ("bsz", "query_len", "kv_len", "dim"))


def failure_note(record: Record) -> str:
    """Why the case has no figures. "" if it has."""
    if record.status == "ok":
        return ""
    reason = textwrap.shorten(record.reason or "", 180, placeholder=" ...")
    if record.status != "oom":
        return reason or record.status
    if record.oom_phase is None:
        return f"OOM: {reason}"
    note = f"OOM in {record.oom_phase}"
    if record.oom_requested_bytes is not None and record.oom_in_use_bytes is not None:
        note += f": {units.format_bytes(record.oom_requested_bytes)} requested, "
        note += f"{units.format_bytes(record.oom_in_use_bytes)} in use"
        whole = predicted_need(record)
        if whole is not None and whole > record.oom_in_use_bytes:
            note += f"; the case needs {units.format_bytes(whole)} in all"
    return note


def settings_of(record: Record, besides: Sequence[str]) -> tuple[Any, ...]:
    """The case's settings and device without some fields. A core dimension equal to dim is not a setting of its own."""
    hidden = {*besides, *(["core_dim"] if "dim" in besides and record.core_dim == record.dim else [])}
    values = (None if field in hidden else getattr(record, field, None) for field in CASE_FIELDS)
    return (*values, place_of(record), record.device_name, record.source)


def groups_besides(records: Sequence[R], besides: Sequence[str]) -> list[list[R]]:
    """Groups of records that differ only in the given fields."""
    groups: dict[tuple[Any, ...], list[R]] = {}
    for record in records:
        groups.setdefault(settings_of(record, besides), []).append(record)
    return list(groups.values())


def lengths(record: Record) -> str:
    """ "512", or "256 x 512" if queries and keys differ in number."""
    if record.kv_len in (record.query_len, None):
        return f"{record.query_len}"
    return f"{record.query_len} x {record.kv_len}"


def select(records: Sequence[Record], wanted: Mapping[str, str]) -> list[Record]:
    """The records whose fields have the wanted values; seq_len matches both lengths."""
    return [record for record in records if all(reads_as(record, *pair) for pair in wanted.items())]


def reads_as(record: Record, field: str, text: str) -> bool:
    fields = ("query_len", "kv_len") if field == "seq_len" else (field,)
    # The combinator has no keys; its query length is its sequence length.
    values = [getattr(record, name, None) for name in fields]
    return any(value is not None for value in values) and all(
        value is None or str(value).lower() == text.lower() for value in values
    )


def parse_wanted(text: str) -> dict[str, str]:
    """Parses "operator=softplus,seq-len=512" into fields and the wanted values."""
    known, wanted = (*CASE_FIELDS, "seq_len", "device", "status", "backend", "source"), {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        field = name.strip().replace("-", "_")
        if not equals or field not in known:
            names = ", ".join(known).replace("_", "-")
            rule = f"must look like operator=softplus,seq-len=512 with any of {names}"
            raise UsageError(f"{named('case')} {rule}, got {word!r}")
        wanted[field] = value.strip()
    return wanted


def is_predicted(record: Record) -> bool:
    return record.source == "predicted"


def split_by_source(records: Sequence[R]) -> tuple[list[R], list[R]]:
    """The measured and the predicted records."""
    return [record for record in records if not is_predicted(record)], [*filter(is_predicted, records)]


def pair(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Each measured record with the prediction of its case and device, the last one if there are several."""
    measured, predicted = split_by_source(records)
    predictions: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in predicted:
        predictions[case_of(record)].append(record)
    pairs = []
    for record in measured:
        fitting = [one for one in predictions[case_of(record)] if is_same_device(record, one)]
        pairs += [(record, fitting[-1])] if fitting else []
    return pairs


def is_same_device(measured: Record, predicted: Record) -> bool:
    """True if the devices match: CPUs by their number of threads, GPUs by catalog name."""
    if measured.device is None:  # The process was killed before it could record its device.
        return True
    if measured.device != predicted.device:
        return False
    if measured.device == "cpu":
        return None in (measured.threads, predicted.threads) or measured.threads == predicted.threads
    names = measured.device_name, predicted.device_name
    pattern = devices.KNOWN_AS.get(predicted.device_name or "")
    return names[0] == names[1] or (pattern is not None and pattern.fullmatch(names[0] or "") is not None)


def on_measured_devices(records: Sequence[Record]) -> list[Record]:
    """The same records, with predictions relabelled by the device of the matching measurements."""
    measured = [record for record in records if not is_predicted(record) and record.device]

    def relabelled(record: Record) -> Record:
        twin = next((other for other in measured if is_same_device(other, record)), record)
        return dataclasses.replace(record, device_name=twin.device_name) if is_predicted(record) else record

    return list(map(relabelled, records))


def ratio(measured: Any, predicted: Any, name: str) -> float | None:
    """Measured bytes divided by predicted bytes. None if either is unknown or the prediction is 0."""
    found, expected = getattr(measured, name), getattr(predicted, name)
    return found / expected if found is not None and expected else None


def ratio_words(measured: Any, predicted: Any, name: str) -> str | None:
    """ "same" if equal to the byte, else "1.0031 x"."""
    found, expected = getattr(measured, name), getattr(predicted, name)
    if found is None or expected is None:
        return None
    return "same" if found == expected else f"{found / expected:.4g} x" if expected else f"+{found} B"
