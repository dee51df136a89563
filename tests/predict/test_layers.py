"""The tree of a predicted model's modules: its figures add up to the record's, and its table folds equal blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memcheck
from memcheck.core.layers import Layer
from memcheck.core.prediction import Prediction
from memcheck.report.predictions import block_names, modules_table, operators_table
from memcheck.report.tables import Screen, to_text

WORDS = 2000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Tied(nn.Module):
    """A language model whose head has the embedding's weight."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, 16), nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.out(x), "features": x[0], "number": 3}


class Twice(nn.Module):
    """Calls a module twice and one never, has a parameter of its own, a dictionary of modules, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.unused, self.shift = nn.Linear(16, 16), nn.Linear(4, 4), nn.Parameter(torch.zeros(16))
        self.norms = nn.ModuleDict({"a": nn.BatchNorm1d(16), "b": nn.LayerNorm(16)})
        self.head = Both()

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.mix(self.norms["a"](x + self.shift)).relu()
        found: dict[str, Any] = self.head(self.mix(self.norms["b"](x)).relu())
        return found


def tied() -> tuple[nn.Module, Tensor]:
    return Tied(), torch.randint(WORDS, (3, 10))


def twice() -> tuple[nn.Module, Tensor]:
    return Twice(), torch.randn(8, 16)


def sequential() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 16, requires_grad=True)


def a_function() -> tuple[Callable[..., Any], Tensor]:
    return (lambda x: x.exp().sum()), torch.randn(8, 16, requires_grad=True)


def walked(layer: Layer) -> list[Layer]:
    return [layer, *(found for part in layer.parts for found in walked(part))]


def peak_of(prediction: Prediction) -> int:
    return max(prediction.record.peaks.values())


def lines_of(prediction: Prediction) -> list[list[str]]:
    """The rows of the table without its numbers: module, class, output."""
    table = prediction.layers.table()
    return [[str(cell) for cell in row[:3]] for row in table.rows]


HOW: dict[str, dict[str, Any]] = {
    "a backward": {},
    "training": {"optimizer": "adamw"},
    "a loop": {"optimizer": "adamw", "accumulate": 2, "set_to_none": False},
    "inference": {"backward": False},
    "a GPU": {"optimizer": "adamw", "device": "A100-40GB"},
}


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("make", [tied, twice, sequential, a_function])
def test_figures_add_up_to_the_records(make: Callable[[], tuple[Any, Tensor]], name: str) -> None:
    model, x = make()
    has_module = isinstance(model, nn.Module)
    how = HOW[name] if has_module else {key: value for key, value in HOW[name].items() if key == "device"}
    prediction = memcheck.predict_memory(model, x, **how)
    layers, record = prediction.layers, prediction.record
    whole = layers[""]
    assert (whole.parameter_bytes, whole.saved_bytes) == (record.parameter_bytes, record.saved_bytes)
    assert whole.peak_bytes == peak_of(prediction)
    if has_module:
        assert whole.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert [*layers] == [path for path, _ in model.named_modules()]
    for layer in layers.values():
        assert min(layer.without_parts().values()) >= 0, layer
    assert {id(layer) for layer in walked(whole)} == set(map(id, layers.values()))


def test_what_does_not_fit_has_its_layers() -> None:
    model, x = sequential()
    prediction = memcheck.predict_memory(model, x, memory_limit=3000)
    assert prediction.fits is False
    assert prediction.peak is not None
    assert prediction.layers[""].peak_bytes == prediction.peak.bytes


def test_what_is_not_predicted_has_no_layers() -> None:
    prediction = memcheck.predict_memory(lambda x: x + torch.ones(4), torch.ones(4), device="A100-40GB")
    assert prediction.record.status == "skipped"
    assert prediction.layers == {}
    assert repr(prediction.layers) == "no modules"
    assert "memcheck" in prediction.layers._repr_html_()


def test_calls_and_shapes_are_those_of_the_forward() -> None:
    model, x = twice()
    layers = memcheck.predict_memory(model, x, optimizer="adamw", accumulate=2).layers
    assert (layers["mix"].calls, layers["mix"].outputs) == (2, ((8, 16),))
    assert (layers["unused"].calls, layers["unused"].outputs) == (0, ())
    assert layers["head"].outputs == ((8, 4), (16,))
    assert layers["norms.a"].parameter_bytes == 4 * 4 * 16 + 8  # Weight, bias, two running figures, and a counter.
    assert layers["norms.a"].parameters == 2 * 16


def test_a_checkpoints_second_forward_is_no_call() -> None:
    model, tokens = tied()
    layers = memcheck.predict_memory(model, tokens, checkpointing=True).layers
    assert {layers[f"blocks.{number}.mlp.0"].calls for number in range(4)} == {1}


def test_shared_parameters_count_in_the_first_module() -> None:
    layers = memcheck.predict_memory(*tied()).layers
    assert layers["embedding"].parameter_bytes == 4 * WORDS * 16
    assert (layers["head"].parameters, layers["head"].parameter_bytes) == (0, 0)
    assert layers["head"].outputs == ((3, 10, WORDS),)


def test_equal_blocks_are_one_row() -> None:
    prediction = memcheck.predict_memory(*tied())
    assert lines_of(prediction) == [
        ["Tied", "None", "3x10x2000"],
        [" embedding", "Embedding", "3x10x16"],
        [" blocks.0 to .3 (4x)", "Block", "3x10x16"],
        ["  norm", "LayerNorm", "3x10x16"],
        ["  mlp", "Sequential", "3x10x16"],
        ["   0", "Linear", "3x10x64"],
        ["   1", "GELU", "3x10x64"],
        ["   2", "Linear", "3x10x16"],
        [" head", "Linear", "3x10x2000"],
        [" outside of submodules", "None", "None"],
    ]
    assert "(Nx): N blocks with these figures each." in repr(prediction.layers)


def test_blocks_with_other_figures_stay_apart() -> None:
    model, tokens = tied()
    model.blocks[1].mlp[0] = nn.Linear(16, 64, bias=False)
    labels = [line[0] for line in lines_of(memcheck.predict_memory(model, tokens))]
    assert [label for label in labels if "blocks" in label] == [" blocks.0", " blocks.1", " blocks.2 to .3 (2x)"]
    mixed = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    labels = [line[0] for line in lines_of(memcheck.predict_memory(mixed, torch.randn(2, 16), backward=False))]
    assert labels == ["Sequential", " 0 to 1 (2x)", " 2", " 3", " outside of submodules"]


def test_the_last_block_at_the_peak_stays_apart() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
    prediction = memcheck.predict_memory(nn.TransformerEncoder(layer, 4), torch.randn(2, 8, 16), optimizer="sgd")
    sizes = [prediction.layers[f"layers.{number}"].peak_bytes for number in range(4)]
    labels = [line[0] for line in lines_of(prediction) if "layers" in line[0]]
    assert sizes[0] == sizes[1] == sizes[2] != sizes[3]
    assert labels == [" layers.0 to .2 (3x)", " layers.3"]


def test_calls_dicts_and_what_is_never_called_are_said() -> None:
    prediction = memcheck.predict_memory(*twice())
    assert lines_of(prediction) == [
        ["Twice", "None", "8x4 +1"],
        [" mix", "Linear", "8x16 (2 calls)"],
        [" unused", "Linear", "not called"],
        [" norms.a", "BatchNorm1d", "8x16"],
        [" norms.b", "LayerNorm", "8x16"],
        [" head", "Both", "8x4 +1"],
        ["  out", "Linear", "8x4"],
        [" outside of submodules", "None", "None"],
    ]
    text = repr(prediction.layers)
    assert "Of several calls, the output of the last is shown." in text
    assert "+1: and another tensor" in text


def test_a_table_fits_80_columns() -> None:
    prediction = memcheck.predict_memory(*tied(), optimizer="adamw", device="A100-40GB")
    for table in (prediction.layers.table(), operators_table(prediction), modules_table(prediction)):
        assert max(map(len, to_text(table, Screen(80)).splitlines())) <= 80


def test_a_data_frame_has_a_row_per_module() -> None:
    prediction = memcheck.predict_memory(*tied())
    frame = prediction.layers.to_pandas()
    assert [*frame.path] == [*prediction.layers]
    assert frame.saved_bytes[0] == prediction.record.saved_bytes


@pytest.mark.parametrize("name", HOW)
def test_operators_add_up_to_the_record(name: str) -> None:
    prediction = memcheck.predict_memory(*tied(), **HOW[name])
    *rows, total = operators_table(prediction).rows
    assert total[-2:] == [peak_of(prediction), prediction.record.saved_bytes or None]
    sizes = [row[-2] or 0 for row in rows]
    assert sizes == sorted(sizes, reverse=True)  # type: ignore[type-var]
    assert sum(sizes) == total[-2]  # type: ignore[arg-type]
    assert sum(row[-1] or 0 for row in rows) == (total[-1] or 0)  # type: ignore[misc]
    assert len({row[0] for row in rows}) == len(rows)


def test_equal_modules_of_blocks_are_one_row() -> None:
    prediction = memcheck.predict_memory(*tied())
    names = [row[0] for row in modules_table(prediction).rows]
    assert len(set(names)) == len(names)
    blocks = len(tied()[0].blocks)
    assert {f"blocks.*{rest} ({blocks}x)" for rest in ("", ".norm", ".mlp.0", ".mlp.1", ".mlp.2")} <= set(names)
    assert block_names(["", "a.0", "a.0.b", "a.1", "a.1.b", "0", "2"]) == {
        "": "outside of submodules",
        "a.0": "a.* (2x)",
        "a.0.b": "a.*.b (2x)",
        "a.1": "a.* (2x)",
        "a.1.b": "a.*.b (2x)",
        "0": "0",
        "2": "2",
    }
