"""What the training of a small language model is made of: its text, and what the benchmarks write."""

import json
import os
from pathlib import Path

import pytest
import torch
from forked import run_python

from memcheck.bench.decoders import SIZES
from memcheck.nn.decoder import ATTENTIONS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return run_python(*words, cwd=ROOT, env=environment, timeout=300)


def test_the_same_seed_tells_the_same_stories(benchmark):
    stories = benchmark("stories")
    one, other, another = (stories.make_stories(5000, seed) for seed in (0, 0, 1))
    assert one.text == other.text != another.text
    assert one.length == len(one.text) == len(one.bits) >= 5000
    assert set(one.text) <= set(stories.ALPHABET)
    assert len(stories.ALPHABET) == len(set(stories.ALPHABET)) == SIZES["mini"].vocabulary <= 128


def test_what_a_story_asks_for_was_said_in_it_once_before(benchmark):
    told = benchmark("stories").make_stories(20_000)
    ends = [*told.starts[1:], told.length]
    for start, end in zip(told.starts, ends, strict=True):
        asked = told.recalls_between(start, end)
        assert [kind for _, _, kind in asked] == ["day", "name", "thing", "place"]
        assert end - start < 250
        for first, last, _ in asked:
            word = told.text[first:last]
            assert f" {word}" in told.text[start : start + 60]
            assert sum(told.bits[first:last]) == 0
    # Day, name, place, thing, and in both sentences between an adjective, an animal, a verb, one of 4 and a place.
    assert sum(told.bits[: told.starts[1]]) == 4 * 4 + 2 * (4 * 4 + 2)


def test_the_part_that_is_held_out_is_not_trained_on(benchmark):
    language_model = benchmark("language_model")
    text = language_model.Text(language_model.make_stories(language_model.CHARACTERS), context=256)
    assert text.stories.length >= 1_000_000
    assert int(text.training.max()) + 256 < text.split <= int(text.held_out.min())
    assert 0.09 < (text.stories.length - text.split) / text.stories.length < 0.11
    told = text.stories.text
    trained, held = set(told[: text.split].splitlines()), set(told[text.split :].splitlines())
    assert not trained & held
    tokens, targets = text.windows(text.held_out[:2])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert text.ids.max() < len(language_model.ALPHABET)


def test_batches_are_those_of_the_seed(benchmark):
    language_model = benchmark("language_model")
    text = language_model.Text(language_model.make_stories(50_000), context=64)
    one, other, another = (torch.stack([x for x, _ in text.batches(2, 3, seed)]) for seed in (0, 0, 1))
    assert torch.equal(one, other)
    assert not torch.equal(one, another)


@pytest.mark.nightly
def test_a_quick_training(tmp_path):
    """Losses fall, naive and softmax agree as float32 does, and a step takes what was predicted, to the byte."""
    done = run(BENCHMARKS / "language_model.py", "--quick", "--output", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    check_training(json.loads((tmp_path / "result.json").read_text()), steps=12)


@pytest.mark.parametrize(("name", "seed"), [("language_model", 0), ("language_model_1", 1)])
def test_the_committed_trainings(name, seed):
    path = BENCHMARKS / f"results/{name}.json"
    assert path.stat().st_size < 300_000
    result = json.loads(path.read_text())
    check_training(result, steps=result["settings"]["steps"])
    assert result["seconds"] <= 20 * 60
    assert result["text"]["characters"] >= 1_000_000
    assert not result["settings"]["quick"]
    assert result["settings"]["seed"] == seed
    assert all(row["nats"] > result["unknowable_nats"] for row in result["rows"])


@pytest.mark.nightly
def test_training_ends_in_time(tmp_path):
    done = run(BENCHMARKS / "language_model.py", "--quick", "--minutes", "0", "--output", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["settings"]["steps"] == 12
    check_training(result, steps=4)


def check_training(result, steps):
    rows = {row["attention"]: row for row in result["rows"]}
    assert set(rows) == set(ATTENTIONS)
    assert result["settings"]["steps_done"] == steps
    assert result["machine"]["threads"] == result["settings"]["threads"]
    for row in rows.values():
        losses = [point["held_out_nats"] for point in row["curve"]]
        assert [point["step"] for point in row["curve"]] == sorted({point["step"] for point in row["curve"]})
        assert row["curve"][-1]["step"] == steps
        assert losses[-1] < losses[0]
        assert row["memory"]["measured"] == row["memory"]["predicted"]
        assert set(row["recall"]) == set(result["guessing"])
        assert all(0 <= asked["right"] <= asked["asked"] > 0 for asked in row["recall"].values())
        assert len(row["sample"]) == 200
        assert row["ms"] > 0
    first = [rows[name]["curve"][0]["held_out_nats"] for name in ("naive", "softmax")]
    torch.testing.assert_close(*map(torch.tensor, first))
    apart = result["same_mathematics"]["apart_in_the_first_steps"]
    torch.testing.assert_close(torch.tensor(first[0] + apart), torch.tensor(first[0]))


@pytest.mark.nightly
def test_quick_predictions_of_models(tmp_path):
    done = run(BENCHMARKS / "models.py", "--quick", "--output", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    check_models(json.loads((tmp_path / "result.json").read_text())["rows"], sizes={"tiny"})


def test_the_committed_predictions_of_models():
    path = BENCHMARKS / "results/models.json"
    assert path.stat().st_size < 300_000
    check_models(json.loads(path.read_text())["rows"], sizes={"small", "medium", "large", "xl", "2.7B"})


def check_models(rows, sizes):
    by_size = [row for row in rows if row["about"] == "sizes"]
    cases = {(row["device_name"], row["size"], row["operator"]) for row in by_size}
    assert cases == {(device, size, name) for device in ("A100-80GB", "H200") for size in sizes for name in ATTENTIONS}
    for row in rows:
        held = row["parameter_bytes"] + row["optimizer_bytes"]
        assert row["optimizer_bytes"] == 2 * row["parameter_bytes"] == 2 * row["gradient_bytes"]
        assert row["peak_bytes"] > held + row["saved_bytes"]
        assert row["status"] == "ok" or row["oom_phase"] in ("forward", "backward", "optimizer")
    means = {(row["autocast"], row["checkpointing"]): row["saved_bytes"] for row in rows if row["about"] == "means"}
    assert max(means[None, True], means["bfloat16", True]) < means["bfloat16", False] < means[None, False]
