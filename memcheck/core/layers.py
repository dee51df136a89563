"""The modules of a predicted model as a tree: what each returns, keeps for the backward, and has alive at the peak."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memcheck.core.html import html_of
from memcheck.core.trace import Allocation, Peak, Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Layer:
    """A module of a model. Its figures are those of all that it contains.

    Attributes:
        path: "" for the model itself, which also has what is outside of modules, such as inputs and the loss.
        kind: its class.
        calls: how often the forward called it.
        outputs: the shapes of the tensors that its last call returned.
        parameters: elements of the parameters. Shared ones count in the first module that has them.
        parameter_bytes: of parameters and buffers.
        saved_bytes: made by the forward, and kept when the backward begins.
        peak_bytes: alive at the highest peak.
        parts: the modules in it.
    """

    path: str
    kind: str
    calls: int
    outputs: tuple[tuple[int, ...], ...]
    parameters: int
    parameter_bytes: int
    saved_bytes: int
    peak_bytes: int
    parts: tuple[Layer, ...] = field(default=(), repr=False)

    def without_parts(self) -> dict[str, int]:
        """The figures of what the module has outside of the modules in it."""
        names = ("parameters", "parameter_bytes", "saved_bytes", "peak_bytes")
        return {name: getattr(self, name) - sum(getattr(part, name) for part in self.parts) for name in names}


class Layers(dict[str, Layer]):
    """Path -> module, the model itself first. Shown as a table, in which repeated blocks with equal figures are folded.

    phase: that of the peak.
    """

    phase = ""

    def table(self) -> Any:
        """The table of memcheck predict --layers."""
        # Tables are above this package, so the function is found by its name.
        return pkgutil.resolve_name("memcheck.report.layers:layers_table")(self)

    def __repr__(self) -> str:
        return repr(self.table()) if self else "no modules"

    def _repr_html_(self) -> str:
        return html_of(self)

    def rows(self) -> list[dict[str, Any]]:
        """The fields of each module, but its parts. Nothing is folded."""
        return [{name: value for name, value in vars(layer).items() if name != "parts"} for layer in self.values()]

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row per module."""
        import pandas as pd

        return pd.DataFrame(self.rows())


def layers_of(trace: Trace, peak: Peak, kind: str) -> Layers:
    """The modules of a traced model. kind: of what is called, if that is no module."""
    own: dict[str, Counter[str]] = {"": Counter(), **{path: Counter() for path in trace.modules}}

    def add(figure: str, allocations: Iterable[Allocation]) -> None:
        for allocation in allocations:
            path = allocation.module
            while path not in own:  # A name of a tensor that is in no module.
                path = path.rpartition(".")[0]
            own[path][figure] += allocation.bytes

    inputs = set(trace.inputs)
    add("parameter_bytes", (one for one in trace.parameters if one not in inputs))
    add("saved_bytes", trace.saved)
    add("peak_bytes", peak.alive)
    children: dict[str, list[Layer]] = {path: [] for path in own}
    found: dict[str, Layer] = {}
    for path in reversed(own):
        parts, module = tuple(reversed(children[path])), trace.modules.get(path)
        names = ("parameter_bytes", "saved_bytes", "peak_bytes")
        sums = {name: own[path][name] + sum(getattr(part, name) for part in parts) for name in names}
        elements = (module.parameters if module else 0) + sum(part.parameters for part in parts)
        called = (module.kind, module.calls, module.outputs) if module else (kind, 0, ())
        found[path] = Layer(path, *called, elements, **sums, parts=parts)
        if path:
            children[path.rpartition(".")[0]].append(found[path])
    layers = Layers((path, found[path]) for path in own)
    layers.phase = peak.phase
    return layers
