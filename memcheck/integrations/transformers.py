"""memcheck's attentions in models of Hugging Face transformers: attention functions, mask functions and a cache.

After `register()`, a model takes attn_implementation="memcheck_compressed", "memcheck_linear" or "memcheck_softplus".
Masks arrive as lengths: no mask of (S, T) is made. What lengths cannot say raises NotImplementedError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from memcheck.ops.compressed_attention import compressed_attention
from memcheck.ops.linear_attention import linear_attention
from memcheck.ops.softplus_attention import softplus_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
except ImportError as error:
    raise ImportError(
        f"memcheck.integrations.transformers needs transformers, pip install transformers: {error}"
    ) from error

__all__ = ["StateCache", "register"]

# Arguments of attention functions that change the result, and what they ask for.
OTHER_ARGUMENTS = {
    "softcap": "softcap",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "head masks",
    "layer_head_mask": "head masks",
    "output_attentions": "attention weights to return",
    "cache": "paged caches",
}


def register() -> None:
    """Registers the attention functions and mask functions by name. A second call changes nothing.

    q (B,H,S,D), k and v (B,Hkv,T,D) are those of the model; H is a multiple of Hkv. A model chooses a function with
    `attn_implementation=`, in from_pretrained, from_config or set_attn_implementation:

    "memcheck_compressed": softmax attention over means of blocks of `model.config.memcheck_factor` positions, 1 without
        that attribute: softmax attention. With `model.config.memcheck_window` a query sees the newest positions as they
        are, as with `window` of memcheck.compressed_attention. The scale is the model's.
    "memcheck_linear": linear attention with the features of elu + 1. There is no softmax, and the scale is not used.
    "memcheck_softplus": every channel of a head is a head of its own: a running mean of the values in the channel,
        weighted by softplus(k) and gated by softplus(q). Queries and keys are never multiplied, and the scale is not
        used. k and v are copied for each query head of a group.

    Padding is never read, and its rows of the result are 0. Without padding, with padding on the left and on the right,
    with DynamicCache, StaticCache and StateCache, the result is that of each sequence alone. It is the same for
    sequences that are packed in one row, B = 1, and told apart by position_ids.

    Functions raise NotImplementedError for what they do not compute: masks that are given with 4 dimensions, holes in a
    mask and padding on both sides of a batch, sliding windows and chunks that are shorter than the sequence,
    sequences packed in several rows, memcheck_window without a causal mask, dropout of attention weights, head masks,
    biases, sinks, softcap, and attention weights as a result.
    """
    for name, attend in ATTENTIONS.items():
        AttentionInterface.register(name, partial(attention_forward, name=name, attend=attend))
        AttentionMaskInterface.register(name, partial(spans_mask, name=name))


def unsupported(name: str, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: does not support {what}; another attn_implementation of the model, such as 'sdpa', may"
    )


class Spans(Tensor):
    """A mask as (B,5,1,1) of int64 on the CPU: for each row of a batch first, end, T, keys and causal.

    Positions from `first` to before `end` count, of the first T of the keys; those of a StaticCache are more. For N
    packed sequences it is (1,5+N+1,1,1), with cu_seqlens behind these numbers. It has 4 dimensions, so that models hand
    it on unchanged; its type tells it from masks that users give. A model that computes with it, because its attention
    is not an attention function, raises.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, Tensor) and not isinstance(x, Spans) for x in tree_leaves((args, kwargs))):
            raise unsupported("memcheck's attention", "models that compute with the mask themselves")
        return super().__torch_function__(func, types, args, kwargs)


class Span(NamedTuple):
    """Spans as numbers."""

    first: list[int]  # (B)
    end: list[int]  # (B)
    T: int
    causal: bool
    cu_seqlens: Tensor | None = None  # (N+1)


def spans_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    *,
    name: str,
    **kwargs: Any,
) -> Tensor:
    """A mask function of transformers: the Spans (B,5,1,1) of a mask (B,T) of padding.

    Raises NotImplementedError if the mask has another pattern than causal or none, or holes.
    """
    causal = mask_function is not bidirectional_mask_function and not allow_is_bidirectional_skip
    T = min(kv_length, int(q_offset) + q_length) if causal else kv_length
    # transformers forbids to skip a mask that is more than causal, bidirectional or a window of local_size.
    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    within = local_size is not None and local_size >= T and skip
    packed = cu_seqlens_of(mask_function)
    known = mask_function in (causal_mask_function, bidirectional_mask_function) or within or packed is not None
    if kv_offset or not known:
        raise unsupported(name, "sliding windows, chunks, sequences packed in several rows and other patterns of masks")
    first, end = torch.zeros(batch_size, dtype=torch.int64), torch.full((batch_size,), T)
    if attention_mask is not None:
        first, end = bounds(name, attention_mask, T)
    rest = torch.tensor([T, kv_length, int(causal), *(() if packed is None else packed)]).expand(batch_size, -1)
    return torch.cat([first[:, None], end[:, None], rest], 1)[:, :, None, None].as_subclass(Spans)


def bounds(name: str, mask: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """The first position that counts in each row of a mask (B,T), and the one after the last: (B) each, on the CPU."""
    counted = torch.nn.functional.pad(mask.bool(), (0, max(0, T - mask.shape[1])))[:, :T]
    both = counted.int().argmax(1), T - counted.flip(1).int().argmax(1)
    first, end, count = torch.stack([*both, counted.sum(1)]).cpu()
    end = end.where(count > 0, first)
    if not torch.equal(end - first, count):
        raise unsupported(name, "masks with holes: the positions that count must follow each other in each row")
    return first, end


def cu_seqlens_of(mask_function: Callable[..., Any]) -> list[int] | None:
    """Where packed sequences begin, and the end of the last, for the causal mask function that transformers makes.

    None of any other function. transformers hands over no more than the function, so its variables are read. It joins
    the function that tells sequences apart and the causal one: up to 5.23 in this order, from 5.24 in the other.
    """
    both = [variables(function) for function in variables(mask_function).get("mask_functions", ())]
    if len(both) != 2:
        return None
    same, causal = sorted(both, key=lambda names: "mask_function" in names)
    sequences = same.get("packed_sequence_mask")
    if sequences is None or len(sequences) != 1 or causal.get("mask_function") is not causal_mask_function:
        return None
    _, lengths = sequences[0].unique_consecutive(return_counts=True)
    ends: list[int] = lengths.cumsum(0).tolist()
    return [0, *ends]


def variables(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The variables of the functions around it, by name."""
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    name: str,
    attend: Callable[..., Any],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: q (B,H,S,D), k and v (B,Hkv,T,D) -> y (B,S,H,D), and no weights."""
    for argument, what in OTHER_ARGUMENTS.items():
        if kwargs.get(argument) is not None and kwargs[argument] is not False:
            raise unsupported(name, what)
    if dropout:
        raise unsupported(name, f"dropout of attention weights, got {dropout}; set it to 0 in the configuration")
    layer = getattr(key, "memcheck_layer", None)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    keys = key.shape[2] if layer is None else layer.seen
    span = read_span(name, attention_mask, query, key, keys, is_causal, kwargs.get("sliding_window"))
    if kwargs.get("cu_seq_lens_q") is not None and span.cu_seqlens is None:
        raise unsupported(name, "packed sequences without position_ids that begin again, or with a mask or a cache")
    config = getattr(module, "config", None)
    blocks = {"factor": getattr(config, "memcheck_factor", 1), "window": getattr(config, "memcheck_window", None)}
    if name == "memcheck_compressed" and blocks["window"] is not None and not span.causal:
        raise unsupported(name, f"memcheck_window = {blocks['window']} without a causal mask")
    attend = partial(attend, causal=span.causal, scale=scaling, blocks=blocks)
    if span.cu_seqlens is not None:
        y = attend(query, key, value, cu_seqlens=span.cu_seqlens)
    elif layer is not None:
        y = layer.attend(name, attend, query, key, value, span)
    else:
        key, value = key[:, :, : span.T], value[:, :, : span.T]
        y = attend_padded(attend, query, key, value, span.causal, padding_of(name, span.first, span.end, span.T))
    return y.transpose(1, 2), None


def read_span(
    name: str, mask: Tensor | None, q: Tensor, k: Tensor, keys: int, causal: bool, window: int | None
) -> Span:
    """The Span of a mask for this number of keys. Without a mask, all positions count.

    Raises NotImplementedError if it is a mask of another kind, or one of other keys.
    """
    B, S = q.shape[0], q.shape[2]
    if mask is None:
        if (causal and k.shape[2] != S) or (window is not None and window < keys):
            raise unsupported(name, f"attention of S = {S} queries to T = {keys} keys in a model that makes no mask")
        return Span([0] * B, [keys] * B, keys, causal)
    if not isinstance(mask, Spans) or mask.dtype != torch.int64 or mask.shape[::2] != (B, 1):
        raise unsupported(name, f"masks with 4 dimensions, got {list(mask.shape)}; give the mask of padding, (B,T)")
    first, end, (T, *_), (masked, *_), (causally, *_), *packed = mask.flatten(1).T.tolist()
    if masked != keys:
        raise unsupported(name, f"a mask of {masked} positions for {keys} keys")
    return Span(first, end, T, bool(causally), torch.tensor(packed)[:, 0] if packed else None)


def padding_of(name: str, first: list[int], end: list[int], T: int) -> dict[str, Any]:
    """The arguments lengths and padding of an operator; none if all T positions of all rows count."""
    rows = [(a, b) for a, b in zip(first, end, strict=True) if a < b]
    right, left = all(a == 0 for a, _ in rows), all(b == T for _, b in rows)
    if right and left and len(rows) == len(first):
        return {}
    if not (right or left):
        raise unsupported(name, "batches with padding on both sides")
    return {"lengths": torch.tensor(end) - torch.tensor(first), "padding": "right" if right else "left"}


def attend_padded(
    attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, causal: bool, padding: dict[str, Any]
) -> Tensor:
    """q (B,H,S,D), k and v (B,Hkv,T,D) -> y (B,H,S,D)"""
    if causal or not padding or q.shape[2] != k.shape[2] or q.shape[2] == 1:
        y: Tensor = attend(q, k, v, **padding)
        return y
    # Operators take lengths for those of queries too if S = T, and queries of another sequence may be longer.
    return torch.cat([attend(part, k, v, **padding) for part in (q[:, :, :1], q[:, :, 1:])], 2)


def attend_compressed(q: Tensor, k: Tensor, v: Tensor, *, blocks: dict[str, Any], **options: Any) -> Any:
    """blocks: factor and window."""
    return compressed_attention(q, k, v, **blocks, **options)


def attend_linear(q: Tensor, k: Tensor, v: Tensor, *, blocks: object, scale: float | None, **options: Any) -> Any:
    return linear_attention(q, k, v, **options)


def attend_softplus(q: Tensor, k: Tensor, v: Tensor, *, blocks: object, scale: float | None, **options: Any) -> Any:
    """Channel d of head h is channel h D + d of the operator. The state has rests, so that it does not drift."""
    H, D = q.shape[1], q.shape[3]
    q = q.transpose(1, 2).flatten(2)
    k, v = (x.repeat_interleave(H // x.shape[1], 1).transpose(2, 3).flatten(1, 2) for x in (k, v))
    if not options.get("return_state"):
        return softplus_attention(q, k, v, **options).unflatten(2, (H, D)).transpose(1, 2)
    y, state = softplus_attention(q, k, v, state_rest=True, **options)
    return y.unflatten(2, (H, D)).transpose(1, 2), state


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "memcheck_compressed": attend_compressed,
    "memcheck_linear": attend_linear,
    "memcheck_softplus": attend_softplus,
}


class StateLayer(CacheLayerMixin):
    """A layer's state of its operator, in place of keys and values.

    `update` returns the new keys and values only, and marks the keys with the layer, in which the attention function
    finds the state. state: as the operator returns it; a list with one for each row where the blocks of compressed
    attention begin at different positions.
    """

    is_sliding = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.operator: str | None = None
        self.state: Any = None
        self.seen = 0
        self.waiting = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.batch_size = key_states.shape[0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """k and v (B,Hkv,n,D), as they are."""
        if self.waiting:
            raise RuntimeError(
                "StateCache: keys and values did not reach an attention function of memcheck; it needs a model with "
                f"attn_implementation among {', '.join(ATTENTIONS)}"
            )
        self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[2]
        self.waiting = True
        key_states = key_states.view_as(key_states)
        key_states.memcheck_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, name: str, attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
        """q (B,H,n,D), k and v (B,Hkv,n,D) of the newest positions -> y (B,H,n,D). The state goes on."""
        if not span.causal:
            raise unsupported(name, "a StateCache of an attention that is not causal")
        if not self.waiting or self.operator not in (None, name):
            raise RuntimeError(f"StateCache: holds the state of another attention, {self.operator or 'none yet'}")
        self.waiting, self.operator = False, name
        n = k.shape[2]
        first, end = ([max(0, x - (self.seen - n)) for x in side] for side in (span.first, span.end))
        padding = padding_of(name, first, end, n)
        if name == "memcheck_compressed" and (padding or isinstance(self.state, list)):
            return self.attend_rows(attend, q, k, v, first, end)
        y: Tensor
        y, self.state = attend(q, k, v, initial_state=self.state, return_state=True, **padding)
        return y

    def attend_rows(
        self, attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, first: list[int], end: list[int]
    ) -> Tensor:
        """The same for each row alone: blocks begin at each row's own first token."""
        if not isinstance(self.state, list):
            rows = torch.arange(q.shape[0], device=q.device)
            self.state = [selected(self.state, row) for row in rows[:, None]]
        y = q.new_zeros(q.shape)
        for b, bounds in enumerate(zip(first, end, strict=True)):
            q_b, k_b, v_b = (x[b : b + 1, :, slice(*bounds)] for x in (q, k, v))
            y_b, self.state[b] = attend(q_b, k_b, v_b, initial_state=self.state[b], return_state=True)
            y[b, :, slice(*bounds)] = y_b[0]
        return y

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = selected(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = selected(self.state, torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                "StateCache: positions cannot be taken out of a state; use a DynamicCache, or copy.deepcopy the cache "
                "before the positions that may be taken back"
            )


def selected(state: Any, rows: Tensor) -> Any:
    """The state of these rows (N) of the batch."""
    if isinstance(state, list):
        return [state[row] for row in rows.tolist()]
    return tree_map_only(Tensor, lambda x: x.index_select(0, rows.to(x.device)), state)


class StateCache(Cache):
    """A cache for generate(past_key_values=...) that holds the state of the operator in place of keys and values.

    For each layer: "memcheck_softplus" 4 B H D numbers, and "memcheck_linear" B Hkv D (D + 1), however many positions
    there are, in the accumulation type; "memcheck_compressed" the means of complete blocks in the dtype of k, 2 B Hkv D
    for each block, and 2 B Hkv D sums of the open one; with a window, means of the blocks before it, and the keys and
    values of at most memcheck_window + memcheck_factor - 2 newest positions.

    It takes padded batches and beams, and goes on from a prompt in pieces. Positions cannot be taken out of a state:
    `crop`, which assisted generation calls, raises NotImplementedError.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=StateLayer)
