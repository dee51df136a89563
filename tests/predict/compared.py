"""Whether a prediction for the CPU equals the measurement of the same step, in every figure of bytes."""

from __future__ import annotations

from typing import Any

import memcheck
from memcheck.core.prediction import Prediction
from memcheck.core.record import Record

OF_THE_MACHINE = {"device_total_bytes", "device_free_bytes"}


def figures(record: Record) -> dict[str, int | None]:
    return {name: size for name, size in vars(record).items() if name.endswith("_bytes") and name not in OF_THE_MACHINE}


def compare(model: Any, *inputs: Any, exact: bool = True, probes: bool = True, **how: Any) -> Prediction:
    """Compares every figure that is not a bound; exact: there is none. Returns the prediction."""
    prediction = memcheck.predict_memory(model, *inputs, probes=probes, **how)
    record = memcheck.measure_memory(model, *inputs, **how)
    assert prediction.record.status == record.status, prediction.record.reason
    assert prediction.exact or not exact, prediction.unknown
    predicted, measured = (
        {name: size for name, size in figures(one).items() if exact or name not in prediction.bounds}
        for one in (prediction.record, record)
    )
    assert predicted == measured
    return prediction
