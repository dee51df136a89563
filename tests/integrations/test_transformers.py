"""memcheck's attentions in tiny random models of transformers: padding, caches, generate, training, errors."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT
from torch import Tensor
from torch.utils._pytree import tree_leaves
from zoo_of_models import loaded

import memcheck

pytestmark = [pytest.mark.ci, pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

NAMES = ("memcheck_compressed", "memcheck_linear", "memcheck_softplus")
VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, FACTOR = 31, 16, 4, 2, 2, 3

# A window W is written behind the name.
WINDOWED = "memcheck_compressed, window 4"

names = pytest.mark.parametrize("name", NAMES)
causal_names = pytest.mark.parametrize("name", [*NAMES, WINDOWED])


@pytest.fixture(scope="module", autouse=True)
def hf(require_package: Callable[[str], None]) -> Any:
    require_package("transformers")
    loaded().with_stubs_of_torchvision()
    import transformers

    from memcheck.integrations.transformers import register

    register()
    register()
    transformers.logging.set_verbosity_error()
    return transformers


@pytest.fixture(scope="module")
def integration(hf: Any) -> Any:
    from memcheck.integrations import transformers

    return transformers


@pytest.fixture(scope="module")
def make(hf: Any) -> Callable[..., Any]:
    """make(kind, attention, **config) -> a model in float64 with weights that do not depend on the attention."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    kinds = {
        "llama": ("Llama", "ForCausalLM", {**sizes, "intermediate_size": 24, "num_key_value_heads": KV_HEADS}),
        "mistral": ("Mistral", "ForCausalLM", {**sizes, "intermediate_size": 24, "num_key_value_heads": KV_HEADS}),
        "gpt2": ("GPT2", "LMHeadModel", {**sizes, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}),
        "bert": ("Bert", "ForMaskedLM", {**sizes, "intermediate_size": 24, "attention_probs_dropout_prob": 0}),
        "modernbert": ("ModernBert", "ForMaskedLM", {**sizes, "intermediate_size": 24, "cls_token_id": 1}),
        "bloom": ("Bloom", "ForCausalLM", {**sizes, "n_layer": 1, "n_head": HEADS}),
        "bart": (
            "Bart",
            "ForConditionalGeneration",
            {"vocab_size": VOCABULARY, "d_model": WIDTH, "decoder_start_token_id": 1, "forced_eos_token_id": None}
            | {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 24))}
            | {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
        ),
    }

    def made(kind: str, attention: str, factor: int = FACTOR, **more: Any) -> Any:
        name, head, given = kinds[kind]
        attention, _, window = attention.partition(", window ")
        more = {"memcheck_window": int(window)} | more if window else more
        config = getattr(hf, f"{name}Config")(**{**given, **special, "memcheck_factor": factor, **more})
        config._attn_implementation = attention
        torch.manual_seed(1)
        model = getattr(hf, f"{name}{head}")(config).double().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(8 if weight.dim() > 1 else 1)  # Attention that is almost uniform would hide mistakes.
        return model

    return made


def tokens(*lengths: int) -> list[Tensor]:
    """Sequences (n) without the token of padding."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator) for n in lengths]


def padded(sequences: list[Tensor], side: str) -> dict[str, Tensor]:
    """input_ids, attention_mask and position_ids (B,T)"""
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side=side)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# ---- padding


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [*itertools.product(NAMES, ["llama", "gpt2", "bert"]), *itertools.product([WINDOWED], ["llama", "gpt2"])],
)
def test_padded_logits_and_gradients_are_those_of_each_sequence(
    make: Callable[..., Any], name: str, kind: str, side: str
) -> None:
    model, sequences = make(kind, name), tokens(9, 4, 7)
    batch = padded(sequences, side)
    logits = model(**batch).logits
    alone = torch.cat([model(input_ids=x[None]).logits[0] for x in sequences])
    close(logits[batch["attention_mask"].bool()], alone)
    weights = list(model.parameters())
    direction = torch.linspace(-1, 1, alone.numel(), dtype=alone.dtype).view_as(alone)
    gradients = [
        torch.autograd.grad((x * direction).sum(), weights, allow_unused=True)
        for x in (logits[batch["attention_mask"].bool()], alone)
    ]
    for padded_gradient, gradient in zip(*gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(padded_gradient, gradient, rtol=1e-7, atol=1e-7)


@causal_names
def test_packed_logits_are_those_of_each_sequence(hf: Any, make: Callable[..., Any], name: str) -> None:
    """As DataCollatorWithFlattening packs them, with and without what it gives to flash attention."""
    model, sequences = make("llama", name), tokens(7, 1, 4)
    alone = torch.cat([model(input_ids=x[None]).logits[0] for x in sequences])
    for flash in (False, True):
        collate = hf.DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
        batch = collate([{"input_ids": x.tolist()} for x in sequences])
        batch.pop("labels")
        close(model(**batch, use_cache=False).logits[0], alone)


@names
def test_an_encoder_decoder_with_a_state(hf: Any, integration: Any, make: Callable[..., Any], name: str) -> None:
    model, batch = make("bart", name), padded(tokens(9, 5), "right")
    batch.pop("position_ids")
    how = {"max_new_tokens": 6, "do_sample": False}
    cache = hf.EncoderDecoderCache(integration.StateCache(), hf.DynamicCache())
    answer = model.generate(**batch, past_key_values=cache, **how)
    assert torch.equal(answer, model.generate(**batch, use_cache=False, **how))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    # Llama's eager attention takes its softmax in float32.
    ("kind", "attention"),
    [("llama", "sdpa"), ("gpt2", "eager"), ("gpt2", "sdpa"), ("bert", "eager"), ("bert", "sdpa")],
)
def test_compressed_attention_of_factor_1_is_softmax_attention(
    make: Callable[..., Any], kind: str, attention: str, side: str
) -> None:
    batch = padded(tokens(9, 4, 7), side)
    ours, theirs = (make(kind, name, factor=1)(**batch).logits for name in ("memcheck_compressed", attention))
    counts = batch["attention_mask"].bool()
    close(ours[counts], theirs[counts])


@pytest.mark.parametrize("T", [6, 9])
def test_cross_attention_reads_no_padding_and_drops_no_query(make: Callable[..., Any], T: int) -> None:
    """Also where there are as many queries as keys, and lengths could be taken for those of queries."""
    batch = padded(tokens(T, 4), "right")
    batch.pop("position_ids")
    batch["decoder_input_ids"] = torch.stack(tokens(6, 6))
    ours, theirs = (make("bart", name, factor=1)(**batch).logits for name in ("memcheck_compressed", "eager"))
    close(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        ("mistral", [{"sliding_window": 9}, {"sliding_window": None}]),
        ("modernbert", [{"local_attention": 18}, {"local_attention": 100}]),  # To both sides, half of it each.
    ],
)
def test_a_window_of_the_whole_sequence_is_none(
    make: Callable[..., Any], kind: str, windows: list[dict[str, Any]]
) -> None:
    batch = padded(tokens(9, 4), "left")
    counts = batch["attention_mask"].bool()
    near, far = (make(kind, "memcheck_compressed", factor=1, **window)(**batch).logits[counts] for window in windows)
    close(near, far)
    close(near, make(kind, "sdpa", **windows[0])(**batch).logits[counts])


def test_without_causal_a_decoder_sees_later_tokens(make: Callable[..., Any]) -> None:
    model, ids = make("llama", "memcheck_linear"), torch.stack(tokens(9))
    changed = torch.cat([ids[:, :8], ids[:, 8:] - 1], 1)
    assert torch.equal(model(ids).logits[:, 0], model(changed).logits[:, 0])
    model.config.is_causal = False
    assert not torch.allclose(model(ids).logits[:, 0], model(changed).logits[:, 0])


# ---- caches


def caches(hf: Any, integration: Any, model: Any) -> Iterator[Any]:
    yield hf.DynamicCache(config=model.config)
    yield hf.StaticCache(config=model.config, max_cache_len=40)
    yield integration.StateCache()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@causal_names
def test_generate_with_any_cache_is_decoding_without_one(
    hf: Any, integration: Any, make: Callable[..., Any], name: str, kind: str
) -> None:
    """Greedy, of a batch with padding on the left, as of each sequence alone."""
    model, sequences = make(kind, name), tokens(8, 5, 2)
    how: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    alone = torch.stack([model.generate(x[None], use_cache=False, **how)[0, x.numel() :] for x in sequences])
    assert alone.unique().numel() >= 5
    batch = padded(sequences, "left")
    batch.pop("position_ids")
    assert torch.equal(model.generate(**batch, use_cache=False, **how)[:, 8:], alone)
    for cache in caches(hf, integration, model):
        assert torch.equal(model.generate(**batch, past_key_values=cache, **how)[:, 8:], alone), cache


@causal_names
def test_a_prompt_in_pieces_gives_the_logits_of_one_call(
    hf: Any, integration: Any, make: Callable[..., Any], name: str
) -> None:
    """The first piece is shorter than the padding of the second row."""
    model, batch = make("llama", name), padded(tokens(11, 4), "left")
    counts = batch["attention_mask"].bool()
    whole = model(**batch).logits[counts]
    for cache in caches(hf, integration, model):
        logits, start = [], 0
        for end in (3, 9, 10, 11):
            piece = {key: x[:, start:end] for key, x in batch.items()} | {"attention_mask": counts[:, :end]}
            logits.append(model(**piece, past_key_values=cache).logits)
            start = end
        close(torch.cat(logits, 1)[counts], whole)


@causal_names
def test_beams_and_several_answers_with_a_state(integration: Any, make: Callable[..., Any], name: str) -> None:
    model, batch = make("llama", name), padded(tokens(7, 4), "left")
    batch.pop("position_ids")
    how = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    expected = model.generate(**batch, **how)
    assert torch.equal(model.generate(**batch, past_key_values=integration.StateCache(), **how), expected)


@torch.no_grad()  # A graph could not be copied.
@causal_names
def test_rows_of_a_state_are_chosen_and_repeated(integration: Any, make: Callable[..., Any], name: str) -> None:
    model, ids = make("llama", name), torch.stack(tokens(5, 5))
    cache, new = integration.StateCache(), torch.stack(tokens(1, 1))
    model(ids, past_key_values=cache)
    expected = model(new, past_key_values=copy.deepcopy(cache)).logits
    other = copy.deepcopy(cache)
    other.batch_repeat_interleave(2)
    close(model(new.repeat_interleave(2, 0), past_key_values=other).logits, expected.repeat_interleave(2, 0))
    other = copy.deepcopy(cache)
    other.batch_select_indices(torch.tensor([1]))
    close(model(new[1:], past_key_values=other).logits, expected[1:])
    cache.reset()
    assert cache.get_seq_length() == 0
    close(model(ids, past_key_values=cache).logits, model(ids).logits)


def nbytes(cache: Any) -> int:
    held = tree_leaves([vars(layer) for layer in cache.layers])
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in held if isinstance(x, Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("side", ["left", "none"])
@names
def test_the_bytes_of_a_state(integration: Any, make: Callable[..., Any], name: str, side: str) -> None:
    """To the byte; those of softplus and linear attention do not depend on the positions.

    From the second call on, compressed attention has room for blocks to come.
    """
    from memcheck.ops.compressed_attention_rooms import LEAST_ROOM

    model, cache = make("llama", name).float(), integration.StateCache()
    B, D, lengths = 2, WIDTH // HEADS, (8, 5 if side == "left" else 8)
    batch = padded(tokens(*lengths), "left")
    batch.pop("position_ids")
    places = [0] * B  # for blocks, of each sequence
    for new in (1, 20, 20):
        for i, blocks in enumerate(n // FACTOR for n in lengths):
            if blocks > places[i]:
                places[i] = blocks + (max(blocks // 2, LEAST_ROOM) if places[i] else 0)
        model.generate(**batch, past_key_values=cache, max_new_tokens=1, do_sample=False)
        held = {
            "memcheck_softplus": 4 * B * HEADS * D,
            "memcheck_linear": B * KV_HEADS * D * (D + 1),
            "memcheck_compressed": sum(2 * KV_HEADS * D * (n + 1) for n in places),
        }
        assert nbytes(cache) == 4 * LAYERS * held[name]
        more = torch.stack(tokens(*[new] * B))
        batch = {
            key: torch.cat([x, more.clamp(max=1) if key == "attention_mask" else more], 1) for key, x in batch.items()
        }
        lengths = tuple(n + new for n in lengths)


@pytest.mark.parametrize("side", ["left", "none"])
def test_the_bytes_of_a_state_with_a_window(integration: Any, make: Callable[..., Any], side: str) -> None:
    """Blocks before the window, and the positions from there on."""
    model, cache, lengths = make("llama", WINDOWED).float(), integration.StateCache(), (20, 9 if side == "left" else 20)
    batch = padded(tokens(*lengths), "left")
    batch.pop("position_ids")
    model.generate(**batch, past_key_values=cache, max_new_tokens=1, do_sample=False)
    blocks = [(n - 4 + 1) // FACTOR for n in lengths]
    rows = sum(C + n - C * FACTOR for C, n in zip(blocks, lengths, strict=True))
    assert nbytes(cache) == 4 * LAYERS * 2 * KV_HEADS * (WIDTH // HEADS) * rows


@pytest.mark.parametrize("side", ["left", "none"])
def test_a_model_with_a_window_is_predicted_to_the_byte(make: Callable[..., Any], side: str) -> None:
    model, batch = make("llama", WINDOWED).float(), padded(tokens(20, 9 if side == "left" else 20), "left")
    how: dict[str, Any] = {"kwargs": batch | {"use_cache": False}, "loss": lambda output: output.logits.sum()}
    measured = memcheck.measure_memory(model, **how)
    predicted = memcheck.predict_memory(model, **how, device="cpu").record
    for field in ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes"):
        assert getattr(predicted, field) == getattr(measured, field), field


@pytest.mark.parametrize("factor", [1, FACTOR])
def test_a_window_of_all_positions_is_softmax_attention(make: Callable[..., Any], factor: int) -> None:
    batch = padded(tokens(9, 4), "left")
    counts = batch["attention_mask"].bool()
    ours = make("gpt2", "memcheck_compressed", factor=factor, memcheck_window=9)(**batch)
    close(ours.logits[counts], make("gpt2", "sdpa")(**batch).logits[counts])


# ---- compiling, saving and training


def test_a_compiled_model_and_a_static_cache_of_a_compiled_generate(hf: Any, make: Callable[..., Any]) -> None:
    model, batch = make("llama", "memcheck_compressed"), padded(tokens(9, 4), "left")
    counts = batch["attention_mask"].bool()
    with torch.no_grad():
        close(torch.compile(model, backend="eager")(**batch).logits[counts], model(**batch).logits[counts])
    batch.pop("position_ids")
    how = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**batch, **how)
    compiled = hf.CompileConfig(backend="eager")
    compiled._compile_all_devices = True  # By default transformers compiles on accelerators only.
    answer = model.generate(**batch, **how, cache_implementation="static", compile_config=compiled)
    assert torch.equal(answer, expected)


@causal_names
def test_a_saved_model_comes_back(hf: Any, make: Callable[..., Any], tmp_path: Path, name: str) -> None:
    model, batch = make("llama", name), padded(tokens(9, 4), "right")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=name.partition(",")[0], dtype=torch.float64
    )
    assert loaded.config.memcheck_factor == FACTOR
    assert getattr(loaded.config, "memcheck_window", None) == (4 if name == WINDOWED else None)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    loaded.set_attn_implementation("sdpa")
    assert not torch.allclose(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@causal_names
def test_the_trainer_with_checkpointing_takes_the_step_without(
    hf: Any, require_package: Callable[[str], None], make: Callable[..., Any], tmp_path: Path, name: str, kind: str
) -> None:
    require_package("accelerate")  # The Trainer needs it.
    weights = []
    for checkpointing in (True, False):
        model = make(kind, name)
        before = copy.deepcopy(model.state_dict())
        rows = [{"input_ids": x, "labels": x} for x in tokens(6, 4)]
        arguments = hf.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=2,
            learning_rate=0.1,
            gradient_checkpointing=checkpointing,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )

        def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            batch = padded([row["input_ids"] for row in rows], "right")
            return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

        hf.Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
        weights.append(model.state_dict())
        assert not all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    for key, weight in weights[0].items():
        assert torch.equal(weight, weights[1][key]), key


# ---- what raises


def holes(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    batch["attention_mask"][0, 3] = 0
    return batch


def both_sides(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    batch["attention_mask"][0, 0] = batch["attention_mask"][1, -1] = 0
    return batch


def four_dimensions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()}


def packed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)}


def packed_otherwise(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"][:1], "cu_seq_lens_q": torch.tensor([0, 3, 8])}


BATCHES = {
    "masks with holes": holes,
    "padding on both sides": both_sides,
    r"masks with 4 dimensions, got \[2, 1, 8, 8\]": four_dimensions,
    "sequences packed in several rows": packed,
    "packed sequences without position_ids": packed_otherwise,
}


@names
@pytest.mark.parametrize("words", BATCHES)
def test_masks_that_lengths_cannot_say_raise(make: Callable[..., Any], words: str, name: str) -> None:
    batch = BATCHES[words](padded(tokens(8, 8), "right"))
    with pytest.raises(NotImplementedError, match=f"^{name}: does not support .*{words}.*; .*attn_implementation"):
        make("llama", name)(**batch, use_cache=False)


@names
def test_windows_and_dropout_raise(make: Callable[..., Any], name: str) -> None:
    ids = torch.stack(tokens(9))
    for kind, window in (("mistral", {"sliding_window": 8}), ("modernbert", {"local_attention": 14})):
        with pytest.raises(NotImplementedError, match=f"^{name}: does not support sliding windows"):
            make(kind, name, **window)(ids)
    model = make("llama", name, attention_dropout=0.1)
    model(ids)
    with pytest.raises(NotImplementedError, match=f"^{name}: does not support dropout of attention weights, got 0.1"):
        model.train()(ids)


def test_a_window_needs_a_causal_mask(make: Callable[..., Any]) -> None:
    for kind in ("bert", "bart"):
        with pytest.raises(NotImplementedError, match="does not support memcheck_window = 4 without a causal mask"):
            make(kind, WINDOWED)(torch.stack(tokens(9)))
    make("bert", "memcheck_linear", memcheck_window=4)(torch.stack(tokens(9)))


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("softcap", 50.0, "softcap"),
        ("s_aux", torch.zeros(HEADS), "attention sinks"),
        ("position_bias", torch.zeros(1), "a position bias"),
        ("head_mask", torch.ones(HEADS), "head masks"),
        ("output_attentions", True, "attention weights"),
        ("sliding_window", 4, "in a model that makes no mask"),
    ],
)
def test_arguments_that_change_the_result_raise(hf: Any, argument: str, value: object, words: str) -> None:
    q, k = torch.randn(2, HEADS, 5, 4), torch.randn(2, KV_HEADS, 5, 4)
    for name in NAMES:
        function, module = hf.AttentionInterface()[name], torch.nn.Module()
        y, weights = function(module, q, k, k, None, **{argument: None})
        assert (y.shape, weights) == ((2, 5, HEADS, 4), None)
        with pytest.raises(
            NotImplementedError, match=f"^{name}: does not support {words}|^{name}: does not support .*{words}"
        ):
            function(module, q, k, k, None, **{argument: value})
        with pytest.raises(
            NotImplementedError, match=f"^{name}: does not support attention of S = 1 queries to T = 5 keys"
        ):
            function(module, q[:, :, -1:], k, k, None)


def test_a_model_that_adds_the_mask_itself_raises(make: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError, match="does not support models that compute with the mask themselves"):
        make("bloom", "memcheck_linear")(torch.stack(tokens(9)))


def test_a_mask_of_other_keys_raises(hf: Any, integration: Any) -> None:
    q = torch.randn(2, HEADS, 5, 4)
    for keys in (3, 9):
        mask = integration.spans_mask(2, 3, keys, keys - 3, name=NAMES[1])
        with pytest.raises(NotImplementedError, match=f"does not support a mask of {keys} positions for 5 keys"):
            hf.AttentionInterface()[NAMES[1]](torch.nn.Module(), q, q, q, mask)


def test_a_state_is_of_one_attention_of_memcheck(integration: Any, make: Callable[..., Any]) -> None:
    model, ids, cache = make("llama", "memcheck_linear"), torch.stack(tokens(5)), integration.StateCache()
    model(ids, past_key_values=cache)
    with pytest.raises(NotImplementedError, match="positions cannot be taken out of a state"):
        cache.crop(-1)
    cache.crop(0)
    model.set_attn_implementation("memcheck_softplus")
    with pytest.raises(RuntimeError, match="holds the state of another attention, memcheck_linear"):
        model(ids, past_key_values=cache)
    model.config.is_causal = False
    with pytest.raises(NotImplementedError, match="does not support a StateCache of an attention that is not causal"):
        model(ids, past_key_values=integration.StateCache())
    model.config.is_causal = True
    model.set_attn_implementation("sdpa")
    cache = integration.StateCache()
    model(ids, past_key_values=cache)
    with pytest.raises(RuntimeError, match="did not reach an attention function of memcheck"):
        model(ids, past_key_values=cache)


# ---- the page


def test_the_example_of_the_page_runs_and_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/integrations.md").read_text(), re.DOTALL)
    assert len(source.splitlines()) <= 30
    exec(source, {})
