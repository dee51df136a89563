"""The study of how well models learn with each attention: its text, its questions, its attentions and its records."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from forked import run_python
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.extension

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_tokens_are_the_text_again(benchmark):
    tokens = benchmark("learning").Tokens(b"def name(self):\n    return self.name\n" * 50)
    text = b"def other(self, \xff\x00):\n    self.name = name\n"
    numbers = tokens.encode(text)
    lengths = tokens.lengths(numbers)
    assert len(numbers) < len(text) == lengths.sum()
    pieces = [bytes([number]) if number < 256 else tokens.pieces[number - 256] for number in numbers.tolist()]
    assert b"".join(pieces) == text
    assert [len(piece) for piece in pieces] == lengths.tolist()


def test_held_out_files_are_not_trained_on(benchmark):
    text = benchmark("learning").Text(files=5)
    assert len(text.held_out) == 5
    assert text.facts["held_out_files"] > 80
    assert len(text.training) > 2_000_000
    assert not any(file in text.training for file in text.held_out)


def test_a_name_to_recall_was_seen_at_that_distance_and_not_since(benchmark):
    learning = benchmark("learning")
    text = b"first_name second_name " + b"x = 1\n" * 100 + b"first_name" + b" = 2\n" * 900 + b"second_name first_name"
    asked = learning.names_to_recall(text)
    assert sorted(one.name for one in asked) == [b"first_name"]
    assert all(text[one.position :].startswith(one.name) for one in asked)
    assert all(text[one.position - one.distance :].startswith(one.name) for one in asked)
    assert all(one.name not in text[one.position - one.distance + 1 : one.position] for one in asked)

    corpus = learning.Text(files=2)
    corpus.names[len(b"first_name")] = [b"other_name"]
    (one,) = asked
    replaced = corpus.without(text, asked)
    assert len(replaced) == len(text)
    assert replaced[: one.position] == text[: one.position].replace(b"first_name", b"other_name")
    assert replaced[one.position :] == text[one.position :]


def test_a_key_is_written_twice_and_its_name_once(benchmark):
    recall = benchmark("recall")
    row = torch.zeros(1024, dtype=torch.int64)
    questions = recall.write_names(row, nearest=100, chance=random.Random(0))
    assert len(questions) == recall.PAIRS
    for position, distance, name in questions:
        assert distance >= 100
        first = position - distance
        assert row[[first, first + 1, position, position + 1]].tolist() == [row[position], name, row[position], 0]
        assert 256 <= row[position] < 256 + recall.KEYS <= name
    keys = row[(row >= 256) & (row < 256 + recall.KEYS)]
    assert sorted(keys.unique(return_counts=True)[1].tolist()) == [2] * recall.PAIRS
    assert (row >= 256 + recall.KEYS).sum() == recall.PAIRS


@pytest.mark.parametrize("length", [1, 100, 128, 300, 512])
def test_a_window_alone_is_softmax_attention_with_its_mask(benchmark, length):
    learning = benchmark("learning")
    q, k, v = torch.randn(3, 2, 2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at = torch.arange(length)
    behind = at[:, None] - at
    expected = scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind < learning.WINDOW))
    torch.testing.assert_close(learning.WindowAttention(learning.WINDOW)(q, k, v), expected)


def test_models_differ_in_attention_alone(benchmark):
    learning = benchmark("learning")
    decoders = {kind: learning.make_decoder(kind, learning.SIZES, seed=0) for kind in learning.KINDS}
    counts = {kind: learning.count(decoder) for kind, decoder in decoders.items()}
    assert 3e6 < min(counts.values()) <= max(counts.values()) <= min(counts.values()) + 16
    first = dict(decoders["softmax"].named_parameters())
    for decoder in decoders.values():
        for name, weight in decoder.named_parameters():
            assert "decay_logit" in name or torch.equal(weight, first[name])


@pytest.mark.parametrize("kind", ["window", "linear-decay-softmax", "compressed-window"])
def test_no_model_sees_later_tokens(benchmark, kind):
    learning = benchmark("learning")
    decoder = learning.make_decoder(kind, learning.SIZES, seed=0)
    tokens = torch.randint(256, (1, 300), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 200:] += 1
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens)[:, :200], decoder(other)[:, :200])
        assert not torch.allclose(decoder(tokens)[:, 200:], decoder(other)[:, 200:])


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["learning", "recall"])
def test_a_quick_study_goes_on_where_it_stopped(tmp_path, script):
    name = {"learning": "text", "recall": "recall"}[script]
    words = (BENCHMARKS / f"{script}.py", "--quick", "--seeds", "0", "--output", tmp_path, "--kinds", "linear-decay")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for kinds, minutes in ([(), "60"], [("window",), "60"], [("softmax",), "0"]):
        done = run_python(*words, *kinds, "--minutes", minutes, cwd=ROOT, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == (minutes != "0")
    written = {path.name: json.loads(path.read_text())["rows"][0] for path in tmp_path.iterdir()}
    assert sorted(written) == [f"{name}-linear-decay-0.json", f"{name}-window-0.json"]
    assert all(record["names"]["500 to 1000"]["names"] > 0 for record in written.values())


def test_each_kind_has_three_seeds(benchmark):
    learned = benchmark("learned")
    for name in ("text", "recall"):
        found = learned.records(name)
        assert all(sorted(record["seed"] for record in of_kind) == [0, 1, 2] for of_kind in found.values())
