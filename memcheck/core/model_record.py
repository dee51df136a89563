"""The record of a measured or predicted whole model: an operator's record plus the model's own figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memcheck.core.record import Record

# Path of a module -> bytes; under "layers" one such mapping per layer.
Activations = dict[str, Any]
# Figures that are both predicted and measured.
FIGURES = (
    *("parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes", "peak_bytes"),
)


@dataclass(repr=False)
class ModelRecord(Record):
    """A record whose operator is the attention and whose query_len is the context. Peaks include the model itself."""

    size: str | None = None
    feed_forward: str | None = None
    feed_forward_dim: int | None = None
    layers: int | None = None
    vocabulary: int | None = None
    autocast: str | None = None  # dtype, or None.
    checkpointing: bool | None = None

    parameters: int | None = None  # Their number. parameter_bytes has neither buffers nor the optimizer's state.
    buffer_bytes: int | None = None  # The tables of rotary positions.
    peak_bytes: int | None = None  # The highest peak of all phases.
    # Bytes kept for backward by the module that first saved them: {"layers": [{"attention_norm": ..}, ..], "norm": ..}
    activations: Activations | None = None
    # Milliseconds: phase, or "total" -> mean, deviation, median.
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    formulas: dict[str, dict[str, Any]] = field(default_factory=dict)  # Name -> formula and value.
    predicted: dict[str, Any] | None = None  # Of a measured record: the predicted figures, exact, unknown, bounds.

    def note_peak(self) -> None:
        """Fills peak_bytes with the highest peak of the phases."""
        self.peak_bytes = max(self.peaks.values(), default=None) if self.status == "ok" else None


def by_layer(kept: dict[str, int], layers: int) -> Activations:
    """Groups the paths of kept_by_component by layer; bytes kept outside any module belong to the loss."""
    activations: Activations = {"layers": [{} for _ in range(layers)]}
    for path, size in kept.items():
        if path.startswith("layers."):
            _, index, component = (*path.split(".", 2), "input")[:3]
            activations["layers"][int(index)][component] = size
        else:
            activations[path or "loss"] = size
    return activations


def components_of(activations: Activations) -> dict[str, int]:
    """Bytes by component: those of the first layer as "layer.attention_norm", and those outside the layers."""
    layer = {f"layer.{name}": size for name, size in activations["layers"][0].items()}
    return {**layer, **{name: size for name, size in activations.items() if name != "layers"}}


def total(activations: Activations) -> int:
    """The bytes of all layers and of everything outside them."""
    layers = sum(sum(layer.values()) for layer in activations["layers"])
    return layers + sum(size for name, size in activations.items() if name != "layers")
