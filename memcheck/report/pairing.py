"""Matches measured records with predictions of the same case on the same device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from memcheck.core.devices import KNOWN_AS
from memcheck.core.record import Record
from memcheck.report.cases import case_of


@dataclass
class Pairing:
    """Measured records with their predictions, and predictions without a measurement."""

    pairs: list[tuple[Record, Record | None]] = field(default_factory=list)
    lonely: list[Record] = field(default_factory=list)

    @property
    def both(self) -> list[tuple[Record, Record]]:
        return [(measured, predicted) for measured, predicted in self.pairs if predicted is not None]


def is_predicted(record: Record) -> bool:
    return record.source == "predicted"


def pair(records: Sequence[Record]) -> Pairing:
    """Matches by case and device. If a case has several predictions, the last one counts."""
    predictions: dict[tuple[object, ...], list[Record]] = {}
    for record in filter(is_predicted, records):
        predictions.setdefault(case_of(record), []).append(record)
    pairing, used = Pairing(), set()
    for record in records:
        if not is_predicted(record):
            fitting = [one for one in predictions.get(case_of(record), []) if is_same_device(record, one)]
            used |= set(map(id, fitting))
            pairing.pairs.append((record, fitting[-1] if fitting else None))
    pairing.lonely = [record for record in records if is_predicted(record) and id(record) not in used]
    return pairing


def is_same_device(measured: Record, predicted: Record) -> bool:
    """True if the devices match: CPUs by their number of threads, GPUs by catalog name."""
    if measured.device is None:  # The process was killed before it could record its device.
        return True
    if measured.device != predicted.device:
        return False
    if measured.device == "cpu":
        return None in (measured.threads, predicted.threads) or measured.threads == predicted.threads
    names = measured.device_name, predicted.device_name
    pattern = KNOWN_AS.get(predicted.device_name or "")
    return names[0] == names[1] or (pattern is not None and pattern.fullmatch(names[0] or "") is not None)


def on_measured_devices(records: Sequence[Record]) -> list[Record]:
    """The same records, with predictions relabelled by the device of the matching measurements."""
    measured = [record for record in records if not is_predicted(record)]
    return [like_measured(record, measured) if is_predicted(record) else record for record in records]


def like_measured(predicted: Record, measured: Sequence[Record]) -> Record:
    twin = next((record for record in measured if record.device and is_same_device(record, predicted)), None)
    return predicted if twin is None else dataclasses.replace(predicted, device_name=twin.device_name)


def ratio(measured: Record, predicted: Record, name: str) -> float | None:
    """Measured bytes divided by predicted bytes. None if either is unknown or the prediction is 0."""
    found, expected = getattr(measured, name), getattr(predicted, name)
    return found / expected if found is not None and expected else None


def ratio_words(measured: Record, predicted: Record, name: str) -> str | None:
    """ "same" if equal to the byte, else "1.0031 x"."""
    found, expected = getattr(measured, name), getattr(predicted, name)
    if found is None or expected is None:
        return None
    return "same" if found == expected else f"{found / expected:.4g} x" if expected else f"+{found} B"
