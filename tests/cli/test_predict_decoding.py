"""memcheck predict --mode decode: what a model's KV cache takes, and how many sequences fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from zoo_of_models import loaded

from memcheck.__main__ import main
from memcheck.bench.capacity import CachedModel, step_workload
from memcheck.bench.catalog import make_case
from memcheck.core.devices import device_named
from memcheck.core.errors import UsageError
from memcheck.core.step import Place
from memcheck.core.tensors import tensors_in
from memcheck.core.workload import Case
from memcheck.measure.measurement import measure_memory

LLAMA = ("--dim", "4096", "--heads", "32", "--kv-heads", "8", "--layers", "32", "--dtype", "bf16")
# Keys and values of 8 heads of 128, 2 bytes each, in 32 layers.
TOKEN = 2 * 8 * 128 * 2 * 32


WS = (1, 6, 9, 100)  # Windows; behind 40 tokens, a step completes a block of 4 with the second, and not with the third.


def decoding(operator: str = "softmax", **fields: object) -> Case:
    sizes = {"bsz": 3, "kv_len": 40, "dim": 48, "heads": 6, "core_dim": None, "factor": 4, "dtype": "float32"}
    return make_case(operator, query_len=1, mode="decode", **{**sizes, **fields})  # type: ignore[arg-type]


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["predict", "--mode", "decode", *words]) == code
    return capsys.readouterr().out


def cache(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, float]:
    return json.loads(said(capsys, *words, "--format", "json", code=code))["cache"]


def test_a_cache_per_token_per_sequence_and_per_gpu(capsys) -> None:
    words = ("--attention-type", "softmax", *LLAMA, "--bsz", "4", "--kv-len", "8190", "--device", "A100-40GB")
    found = cache(capsys, *words, "--block-size", "16", "--weights", "16GB")
    assert found["bytes_per_token"] == TOKEN == 131072
    assert found["bytes_per_sequence"] == 8192 * TOKEN
    assert found["bytes"] == 4 * 8192 * TOKEN
    step = found["need_bytes"] - found["bytes"] - 16 * 10**9
    assert 0 < step < 2**20
    assert found["sequences"] == 23
    assert cache(capsys, *words)["bytes_per_sequence"] == 8190 * TOKEN
    # Without weights there is room for more.
    room = device_named("A100-40GB").usable_bytes or 0
    assert 23 < cache(capsys, *words, "--block-size", "16")["sequences"] <= room // (8192 * TOKEN)


def test_the_second_copy_of_a_concatenation_counts_only_if_asked(capsys) -> None:
    words = ("--attention-type", "softmax", *LLAMA, "--kv-len", "1024", "--device", "cpu")
    once, twice = cache(capsys, *words), cache(capsys, *words, "--concatenate")
    longer = 1025 * TOKEN // 32
    assert twice["bytes"] == once["bytes"]
    assert longer <= twice["need_bytes"] - once["need_bytes"] < longer + 2**12


@pytest.mark.extension
@pytest.mark.parametrize(
    ("operator", "window"),
    [
        ("naive", None),
        ("softmax", None),
        ("linear-causal", None),
        ("compressed", None),
        *(("compressed", W) for W in WS),
    ],
)
@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("concatenates", [False, True])
def test_the_step_of_a_layer_is_predicted_to_the_byte(
    operator: str, window: int | None, kv_heads: int | None, concatenates: bool
) -> None:
    if concatenates and operator not in ("naive", "softmax"):
        return
    model = CachedModel(decoding(operator, window=window), kv_heads, concatenates=concatenates)
    predicted = model.predict_step(device_named("cpu"))
    workload = step_workload(model.case, kv_heads=kv_heads, concatenates=concatenates)
    measured = measure_memory(workload.operator, *workload.inputs, backward=False)
    assert predicted.record.forward_peak_bytes == measured.forward_peak_bytes
    assert predicted.record.state_bytes == model.state_bytes(3)


@pytest.mark.extension
@pytest.mark.parametrize("operator", ["naive", "softmax", "linear-causal", "compressed"])
def test_fewer_heads_of_keys_give_the_attention_of_repeated_ones(operator: str) -> None:
    case = decoding(operator)
    grouped = step_workload(case, kv_heads=2, concatenates=False)
    q, k, v, state = grouped.inputs
    whole = step_workload(case, kv_heads=None, concatenates=False)

    def repeated(x: object) -> object:
        return x.repeat_interleave(3, 1) if isinstance(x, torch.Tensor) else x

    kind = (lambda parts: tuple(parts)) if type(state) is tuple else (lambda parts: type(state)(*parts))
    expected, _ = whole.operator(q, repeated(k), repeated(v), kind(map(repeated, state)))
    y, _ = grouped.operator(q, k, v, state)
    torch.testing.assert_close(y, expected)


@pytest.mark.extension
def test_states_that_do_not_grow(capsys) -> None:
    found = cache(
        capsys, "--attention-type", "softplus", "--kv-len", "1000", "--dim", "64", "--layers", "3", "--device", "cpu"
    )
    assert (found["bytes_per_token"], found["bytes_per_sequence"]) == (0, 3 * 2 * 64 * 4)
    assert found["sequences"] is None
    out = said(capsys, "--attention-type", "linear-causal", "--kv-len", "1000", "--device", "cpu")
    assert "state per sequence of 1,000 tokens" in out
    assert "The cpu has no limit of its own (--memory-limit)." in out
    compressed = CachedModel(decoding("compressed"), layers=5)
    assert compressed.bytes_per_token == 5 * 2 * 48 * 4 / 4


@pytest.mark.extension
def test_the_state_of_a_window(capsys) -> None:
    """Blocks before the window, and the positions from there on."""
    flags = ("--attention-type", "compressed", "--kv-len", "40", "--dim", "48", "--heads", "6", "--factor", "4")
    found = cache(capsys, *flags, "--window", "10", "--device", "cpu")
    blocks = (40 - 10 + 1) // 4
    assert found["bytes_per_sequence"] == 2 * 48 * (blocks + 40 - 4 * blocks) * 4
    assert found["bytes_per_token"] == 2 * 48 * 4 / 4  # One block for 4 tokens; the window does not grow.
    assert main(["predict", "--mode", "decode", "--attention-type", "softmax", "--window", "10"]) == 2
    assert capsys.readouterr().err == "memcheck: --window is only for compressed, got --attention-type softmax\n"


def test_the_largest_batch_is_the_last_that_fits() -> None:
    model = CachedModel(decoding(dim=64, heads=4), 2, layers=4, weights_bytes=50_000)
    cpu, limit = device_named("cpu"), 10**6
    place = Place(cpu, limit)
    most = model.most_sequences(place)
    assert most
    assert most > 3
    for bsz, status in ((most, "ok"), (most + 1, "oom")):
        assert model.predict_step(place, bsz).record.status == status
        need = dataclasses.replace(model, case=decoding(dim=64, heads=4, bsz=bsz)).need_bytes(cpu)
        assert need is not None
        assert (need <= limit) == (status == "ok")
    assert model.most_sequences(Place(cpu, 50_001)) == 0


def test_the_verdict_is_about_all_layers(capsys) -> None:
    words = ("--attention-type", "softmax", *LLAMA, "--kv-len", "8192", "--bsz", "16", "--device", "cpu")
    assert "16 sequences of 8,192 tokens fits cpu" in said(capsys, *words, "--memory-limit", "17GiB", "--fail-on-oom")
    out = said(capsys, *words, "--memory-limit", "15GiB", "--fail-on-oom", code=3)
    assert "8,192 tokens does not fit cpu: it needs 16 GiB of 15 GiB." in out
    assert "The largest batch that fits is 14 sequences" in out
    assert "does not fit" in said(capsys, *words, "--memory-limit", "17GiB", "--weights", "2GiB")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-heads", "2"], "--kv-heads is for --mode decode, got --mode train"),
        (["--concatenate", "--mode", "inference"], "--concatenate is for --mode decode, got --mode inference"),
        (["--mode", "decode", "--kv-heads", "3"], "--kv-heads must divide --heads, got 3, and naive has 4 heads"),
        (["--mode", "decode", "--attention-type", "softplus", "--kv-heads", "2"], "got 2, and softplus has no heads"),
        (
            ["--mode", "decode", "--attention-type", "linear", "--block-size", "2"],
            "--block-size is for a cache of keys",
        ),
        (["--mode", "decode", "--attention-type", "flex"], "are not for --mode decode"),
        (["--mode", "decode", "--attention-type", "cs336/naive"], "cs336/naive has no decoding step"),
        (["--mode", "decode", "--layers", "0"], "--layers must be at least 1, got 0"),
        (["--mode", "decode", "--weights", "16"], "--weights 16: 16 what? write 16GiB or 16B"),
    ],
)
def test_wrong_flags_are_one_line(capsys, words: list[str], message: str) -> None:
    assert main(["predict", *words, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_model_without_a_decoding_step_is_refused() -> None:
    with pytest.raises(UsageError, match="no decoding step"):
        CachedModel(
            make_case(
                "cs336/naive",
                query_len=1,
                mode="decode",
                kv_len=8,
                bsz=1,
                dim=8,
                heads=None,
                core_dim=None,
                factor=None,
                dtype="float32",
            )
        )


def configuration(folder: Path, kind: str = "llama", **sizes: int) -> Path:
    """The file of a tiny configuration of transformers."""
    pytest.importorskip("transformers")
    loaded().with_stubs_of_torchvision()
    values = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 128, **values, **sizes}))
    return path


@pytest.mark.filterwarnings("ignore")
def test_the_cache_of_a_configuration_is_that_of_transformers(tmp_path: Path, capsys) -> None:
    path = configuration(tmp_path, num_key_value_heads=2, max_position_embeddings=64)
    import transformers

    flags = ("--hf-config", str(path), "--bsz", "3", "--seq-len", "24", "--device", "cpu")
    found = cache(capsys, *flags)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_json_file(str(path)))
    with torch.no_grad():
        state = model(torch.ones(3, 24, dtype=torch.int64), use_cache=True).past_key_values
    assert found["bytes"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in state.layers)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    assert found["weights_bytes"] == sum(tensors.values())
    assert cache(capsys, *flags, "--weights", "1MiB")["weights_bytes"] == 2**20
    for words, message in {
        "--layers 3": "--layers is not for --hf-config in --mode decode, got 3",
        "--optimizer adamw": "--optimizer is not for --hf-config in --mode decode",
        "--kv-len 8": "--kv-len is for operators, not for --hf-config",
    }.items():
        assert main(["predict", "--mode", "decode", *flags, *words.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.extension
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["memcheck_compressed", "memcheck_linear"])
def test_the_state_of_a_configuration_with_our_attention(tmp_path: Path, capsys, attention: str) -> None:
    path = configuration(tmp_path, num_key_value_heads=2, memcheck_factor=4, memcheck_window=6)
    import transformers

    from memcheck.integrations.transformers import StateCache, register

    register()
    flags = ("--hf-config", str(path), "--bsz", "3", "--seq-len", "24", "--device", "cpu", "--attention", attention)
    config = transformers.LlamaConfig.from_json_file(str(path))
    model, states = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention), StateCache()
    with torch.no_grad():
        model(torch.ones(3, 24, dtype=torch.int64), past_key_values=states)
    assert cache(capsys, *flags)["bytes"] == sum(x.nbytes for layer in states.layers for x in tensors_in(layer.state))
    assert main(["predict", "--mode", "decode", *flags[:-1], "memcheck_softplus"]) == 2
    assert "--attention is not for --hf-config in --mode decode, got memcheck_softplus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "words"), [("mamba", "layers of linear_attention"), ("t5", "an encoder and a decoder")]
)
def test_other_states_than_caches_are_refused(tmp_path: Path, kind: str, words: str, capsys) -> None:
    path = configuration(tmp_path, kind)
    assert main(["predict", "--hf-config", str(path), "--mode", "decode", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert f"the model of {path} " in err
    assert words in err


def test_windows_are_counted_with_the_whole_length(tmp_path: Path, capsys) -> None:
    path = configuration(tmp_path, "mistral", num_key_value_heads=4, sliding_window=16)
    words = ["predict", "--mode", "decode", "--hf-config", str(path), "--seq-len", "64", "--device", "cpu"]
    assert main([*words, "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cache"]["bytes"] == 2 * 2 * 64 * 32 * 4
    assert "layers with a sliding window are counted with the whole length" in err
