"""Training programs of different kinds, as people publish them, run unmodified on a simulated GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from simulated.commands import STUBS, Ran, memcheck_run

pytestmark = [
    pytest.mark.extension,
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions allocate otherwise"),
]

MIB = 2**20
CUBLAS = 4096 * 2048 + 128 * 1024  # torch's workspace of a thread that multiplies matrices: 2 of 4 MiB, 8 of 16 KiB.
ENDED = "the last three allocated the same; what would come later, such as evaluation or saving, was not run: --whole"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """Runs a program of the folder programs."""

    def run_program(name: str, device: str, *words: str, whole: bool = False, stubs: bool = False) -> Ran:
        text = (Path(__file__).parent / "programs" / f"{name}.py").read_text()
        (tmp_path / f"{name}.py").write_text(STUBS + text if stubs else text)
        flags = ["--whole"] if whole else []
        done = memcheck_run(tmp_path, "--device", device, *flags, f"{name}.py", *words)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        assert done.report[0].startswith(f"Simulated {device} ("), done.err
        assert " for torch): it fits. Peak " in done.report[0]
        return done

    return run_program


def alive(done: Ran, kind: str) -> int:
    """Bytes alive at the peak of parameters, buffers or optimizer state."""
    return sum(each["bytes"] for each in done.record["alive"] if each["place"]["kind"] == kind)


def kept(done: Ran) -> int:
    """Bytes alive at the end of the last step but one: the last one is the end of the script."""
    return done.record["step_ends"][-2]["bytes"]


def cnn_parameters() -> int:
    blocks = [(3, 64), (64, 128), (128, 256)]
    return sum(9 * n * m + 9 * m * m + n * m + 4 * m for n, m in blocks) + 256 * 10 + 10


def test_a_cnn_with_workers_and_scaled_gradients(run: Callable[..., Ran]) -> None:
    done = run("cnn_amp", "RTX-4090")
    assert done.record["ended"].startswith("Ended after 5 optimizer steps, as " + ENDED)
    weights, buffers = 4 * cnn_parameters(), 2 * (64 + 128 + 256) * 2 * 4 + 6 * 8
    assert (alive(done, "parameters"), alive(done, "optimizer state")) == (weights, weights)
    assert alive(done, "buffers") == buffers
    images, labels = 128 * 3 * 32 * 32 * 4, 128 * 8
    counted = 3 * weights + buffers + images + labels + 2 * CUBLAS  # With gradients; the backward has a thread.
    assert 0 <= kept(done) - counted < 8192  # The output, the loss, the scale.
    # Three results of 64 channels are saved in the first block, and gradients of two are alive, in 16 bits.
    results = 128 * 64 * 32 * 32 * 2
    assert done.record["peak"]["place"]["operator"] == "ConvolutionBackward0"
    assert counted - weights + 6 * results < done.record["peak"]["bytes"] < counted + 10 * results


def test_a_cnn_runs_to_its_end_and_saves_a_checkpoint(run: Callable[..., Ran], tmp_path: Path) -> None:
    done = run("cnn_amp", "T4", "--epochs", "2", "--images", "512", whole=True)
    assert (done.record["ended"], done.record["steps"], done.record["unwritten"]) == (None, 2 * 4, [])
    assert f"epoch 1 done, {done.record['allocated_bytes'] / MIB:.0f} MiB\n" in done.out
    assert "epoch 1 step 0: loss 1.000, correct 128/128\n" in done.out
    states = torch.load(tmp_path / "cnn.pt", map_location="cpu")["optimizer"]["state"].values()
    assert sum(state["momentum_buffer"].numel() for state in states) == cnn_parameters()


def lstm_bytes(words: int, width: int = 512) -> int:
    return 4 * (words * width + words + 2 * (2 * 4 * width * width + 2 * 4 * width))


def test_a_language_model_of_lstms(run: Callable[..., Ran]) -> None:
    done = run("lstm_language_model", "RTX-4090")
    assert done.record["ended"].startswith("Ended after 4 optimizer steps, as " + ENDED)
    weights, logits = lstm_bytes(20_000), 35 * 32 * 20_000 * 4
    assert f"{weights // 4:,} parameters\n" in done.out
    assert (alive(done, "parameters"), alive(done, "optimizer state")) == (weights, 2 * weights)
    corpus = 100_000 * 8
    counted = 4 * weights + corpus + 2 * CUBLAS
    assert 0 <= done.record["left_bytes"] - counted - logits < MIB  # Left in the frame: the output, the hidden state.
    assert "aten::_cudnn_rnn_flatten_weight" in {each["place"]["operator"] for each in done.record["alive"]}
    # The logits, their logarithms, and the gradients of both, before any gradient of a weight.
    excess = done.record["peak"]["bytes"] - (3 * weights + 4 * logits + corpus + 2 * CUBLAS)
    assert 0 < excess < 12 * MIB  # Saved by dropout and cuDNN.


def test_a_large_checkpoint_is_not_written(run: Callable[..., Ran], tmp_path: Path) -> None:
    done = run("lstm_language_model", "T4", "--words", "30000", "--tokens", "6000", "--epochs", "1", whole=True)
    assert done.record["steps"] == 5
    assert [file["bytes"] for file in done.record["unwritten"]] == [lstm_bytes(30_000)]
    assert any(line.startswith("Not written, as their tensors are not computed: ") for line in done.report), done.err


def gan_bytes(f: int = 64, nz: int = 100) -> int:
    makes = 16 * (nz * 8 * f + 8 * f * 4 * f + 4 * f * 2 * f + 2 * f * 3) + 2 * (8 + 4 + 2) * f
    judges = 16 * (3 * f + 4 * f * f) + 64 * 4 * f + 2 * 4 * f
    return 4 * (makes + judges)


@pytest.mark.smoke
def test_a_gan_of_two_optimizers(run: Callable[..., Ran]) -> None:
    done = run("dcgan", "T4")
    assert re.match(r"Ended after \d steps of the optimizer that steps most often, as " + ENDED, done.record["ended"])
    weights = gan_bytes()
    assert (alive(done, "parameters"), alive(done, "optimizer state")) == (weights, 2 * weights)
    assert kept(done) > 4 * weights  # With the gradients.
    assert done.record["peak"]["bytes"] < 8 * weights
    assert "[0/5][0] Loss_D: 1.0000 Loss_G: 1.0000\n" in done.out


def llama_parameters(layers: int = 8, h: int = 1024, words: int = 32_000) -> int:
    return 2 * words * h + layers * (2 * h * h + 2 * h * h // 4 + 3 * 4 * h * h + 2 * h) + h


@pytest.mark.ci
def test_a_trainer_with_lora(run: Callable[..., Ran], require_package: Callable[[str], None]) -> None:
    require_package("transformers")
    require_package("peft")
    done = run("lora_trainer", "A100-80GB", stubs=True)
    assert re.match(r"Ended after \d optimizer steps, as the last three ", done.record["ended"])
    base, lora = llama_parameters(), 8 * 8 * (2 * 1024 + 1024 + 256)
    assert f"trainable params: {lora:,} || all params: {base + lora:,} " in done.out
    assert alive(done, "parameters") == 2 * base + 4 * lora  # peft keeps its weights in 32 bits.
    assert 0 <= alive(done, "optimizer state") - 2 * 4 * lora <= 2 * 4 * 8 * 4  # And a counter for each.
    modules = {each["place"]["module"] for each in done.record["alive"] if each["place"]["kind"] == "parameters"}
    assert all(module.startswith("PeftModelForCausalLM.") for module in modules)  # And not of a checkpointed layer.
    # Logits in 32 bits, their logarithms and two gradients.
    logits = 4 * 512 * 32_000 * 4
    assert done.record["peak"]["bytes"] > 2 * base + 3 * logits
    assert kept(done) < 2 * base + 5 * 4 * lora + 2 * CUBLAS + MIB
    assert "{'loss': " in done.out


@pytest.mark.ci
def test_a_lightning_module(run: Callable[..., Ran], require_package: Callable[[str], None]) -> None:
    require_package("lightning")
    done = run("lightning_autoencoder", "A100-80GB", stubs=True)
    assert done.record["ended"].startswith("Ended after 4 optimizer steps, as " + ENDED)
    weights = 4 * (2 * (784 * 4096 + 4096 * 32) + 2 * 4096 + 32 + 784)
    assert (alive(done, "parameters"), alive(done, "optimizer state")) == (weights, 2 * weights)
    # The gradients, the roots of the second moments, the batch.
    counted = 5 * weights + 256 * 784 * 4 + 2 * CUBLAS
    assert done.record["peak"]["place"]["operator"] == "aten::_foreach_sqrt"
    assert 0 <= done.record["peak"]["bytes"] - counted < 8192
    assert "best:" not in done.out


@pytest.mark.ci
def test_lightning_runs_to_its_end(
    run: Callable[..., Ran], require_package: Callable[[str], None], tmp_path: Path
) -> None:
    require_package("lightning")
    done = run("lightning_autoencoder", "T4", "--max-epochs", "1", whole=True, stubs=True)
    assert (done.record["ended"], done.record["steps"]) == (None, 8)
    assert "best.ckpt" in done.out
    # Lightning saves to a buffer and writes that.
    assert [file["path"] for file in done.record["unwritten"]] == ["a buffer"]
    assert [file.stat().st_size for file in (tmp_path / "checkpoints").glob("*.ckpt")] == [0, 0]
    assert any(line.endswith(" Such files are missing or empty, and loading them fails.") for line in done.report)


@pytest.mark.ci
def test_generation_by_gpt2(run: Callable[..., Ran], require_package: Callable[[str], None]) -> None:
    require_package("transformers")
    done = run("gpt2_generate", "RTX-4090", stubs=True)
    assert (done.record["ended"], done.record["step_ends"][-1]["step"]) == (None, 32)
    parameters = 50257 * 768 + 1024 * 768 + 12 * (12 * 768 * 768 + 13 * 768) + 2 * 768
    assert f"{parameters:,} parameters, " in done.out
    assert "(8, 96) in " in done.out
    assert alive(done, "parameters") == 2 * parameters
    growth = 2 * 12 * 8 * 768 * 2  # A key and a value for each layer and sequence.
    assert sum(each["bytes_per_step"] for each in done.record["growing"]) == growth
    assert f"peak {done.record['allocated_bytes'] / MIB:.1f} MiB\n" in done.out
