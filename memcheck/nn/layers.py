"""The bases of modules: checks of arguments, four linear layers, rotary positions, forward and step with a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from memcheck.ops.checks import SelfSequences, check_floating, check_plain, is_symbolic

if TYPE_CHECKING:
    from typing_extensions import Unpack


def check_positive(module: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{module}: {name} must be positive, got {size}")


def check_divides(module: str, divisor: str, part: int, dividend: str, whole: int) -> None:
    if whole % part:
        raise ValueError(f"{module}: {divisor} must divide {dividend} = {whole}, got {part}")


def check_decay(module: str, decay: object, kv_heads: int, causal: bool, learned: bool) -> None:
    """TypeError or ValueError unless decay is None or a number for each key head in (0, 1], below 1 if learned."""
    if decay is None:
        if learned:
            raise ValueError(f"{module}: learned_decay needs a decay, from which it starts, got decay=None")
        return
    if isinstance(decay, str) or not isinstance(decay, Sequence):
        raise TypeError(f'{module}: decay must be numbers, "retnet" or None, got {decay!r}')
    if not causal:
        raise ValueError(f"{module}: decay needs causal=True, got causal=False")
    if len(decay) != kv_heads:
        raise ValueError(f"{module}: decay must be kv_heads = {kv_heads} numbers, got {len(decay)}")
    for number in decay:
        if not 0 < number <= 1 or (learned and number == 1):
            raise ValueError(f"{module}: decay must be in {'(0, 1)' if learned else '(0, 1]'}, got {number}")


def check_tokens(module: str, x: Tensor, dim: int) -> None:
    """x (B,S,E)"""
    if is_symbolic(x):
        return
    check_plain(module, "x", x)
    check_floating(module, "x", x)
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f"{module}: x must be (B,S,E) with E = {dim}, got {shape(x)}")


def check_step(module: str, x: Tensor, causal: bool) -> None:
    """x (B,n,E)"""
    if not causal:
        raise ValueError(f"{module}: step needs causal=True, got causal=False")
    if x.shape[1] == 0:
        raise ValueError(f"{module}: step needs at least one position, got x {shape(x)}")


def refuse_scripting(self: object) -> NoReturn:
    """Raises. torch.jit.script calls it as __prepare_scriptable__ before it compiles a module."""
    raise NotImplementedError(
        f"{type(self).__name__}: torch.jit.script does not compile it; use torch.export.export, torch.compile or "
        "torch.jit.trace"
    )


def shape(x: Tensor) -> str:
    return "(" + ",".join(map(str, x.shape)) + ")"


class Options(SelfSequences, total=False):
    """Optional arguments of a forward beside return_state, for type checkers."""

    initial_state: Any


class SelfAttentionLayers(torch.nn.Module):
    """Linear layers: x (B,S,E) -> q (B,S,q_dim), k and v (B,S,kv_dim), and y (B,S,q_dim) -> (B,S,E)."""

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self, dim: int, q_dim: int, kv_dim: int, *, bias: bool, device: DeviceLike, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.dim = dim
        self.q_proj = torch.nn.Linear(dim, q_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = torch.nn.Linear(dim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = torch.nn.Linear(dim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = torch.nn.Linear(q_dim, dim, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        for layer in self.children():
            layer.reset_parameters()  # type: ignore[operator]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the operator takes them: views of what the layers wrote."""
        raise NotImplementedError

    def leave(self, y: Tensor) -> Tensor:
        """y of the operator -> (B,S,E)"""
        raise NotImplementedError


class HeadedSelfAttention(SelfAttentionLayers):
    """x (B,S,E) -> q (B,H,S,D), k and v (B,Hkv,S,D), and y (B,H,S,D) -> (B,S,E), where D = E / H."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None, *, bias: bool, device: DeviceLike, dtype: torch.dtype | None
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        name = type(self).__name__
        check_positive(name, dim=dim, heads=heads, kv_heads=kv_heads)
        check_divides(name, "heads", heads, "dim", dim)
        check_divides(name, "kv_heads", kv_heads, "heads", heads)
        super().__init__(dim, dim, kv_heads * (dim // heads), bias=bias, device=device, dtype=dtype)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_tokens(type(self).__name__, x, self.dim)
        q, k, v = (
            layer(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def leave(self, y: Tensor) -> Tensor:
        tokens: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        return tokens


class StatefulSelfAttention(SelfAttentionLayers):
    """The forward and the step of attention with a state of constant size."""

    causal: bool
    operator: Callable[..., Any]
    step_operator: Callable[..., Any]
    positions: tuple[int, int, int]  # the dimensions of q, k and v that are positions

    def options(self, q: Tensor) -> dict[str, Any]:
        """Arguments of the operator and its step."""
        raise NotImplementedError

    @overload
    def forward(self, x: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, *, return_state: Literal[True], **options: Unpack[Options]) -> tuple[Tensor, Any]: ...

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: str = "right",
        initial_state: Any = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Any]:
        """x (B,S,E) -> y (B,S,E); with `return_state` (y, state), which `step` takes too.

        `cu_seqlens`, `lengths`, `padding` and `initial_state` are those of the operator. Where padded, y is 0, or the
        bias of out_proj if it has one. The projections read padding, so x must be finite there if a weight wants a
        gradient.
        """
        q, k, v = self.project(x)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "lengths": lengths, "padding": padding}
        options |= {"initial_state": initial_state, "return_state": return_state, **self.options(q)}
        result = self.operator(q, k, v, causal=self.causal, **options)
        return (self.leave(result[0]), result[1]) if return_state else self.leave(result)

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward

    @torch.no_grad()
    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The newest positions, from a state instead of all earlier tokens; no gradient.

        Args:
            x: (B,n,E), the tokens that are new since the state: the prompt first, then one at a time.
            state: the result of the previous step, or of the forward with return_state; None at the beginning. It is
                that of the operator's own step, in the accumulation type.

        Returns:
            y (B,n,E), equal to the last n rows of the forward over all tokens up to rounding, and the new state. Each
            token rounds the state once; the operator's step says what the error is.
        """
        inputs = self.project(x)
        check_step(type(self).__name__, x, self.causal)
        options = self.options(inputs[0])
        if state is None:
            y = self.operator(*inputs, causal=True, **options)
            q, k, v = inputs
            _, state = self.step_operator(q.narrow(self.positions[0], x.shape[1] - 1, 1), k, v, **options)
            return self.leave(y), state
        rows = []
        for one in zip(*(part.split(1, dim) for part, dim in zip(inputs, self.positions, strict=True)), strict=True):
            row, state = self.step_operator(*one, state, **options)
            rows.append(row)
        return self.leave(torch.cat(rows, self.positions[0])), state


DeviceLike = torch.device | str | int | None
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Weighted(torch.nn.Module):
    """A module with one `weight` (.., rows, cols), which is initialised uniformly in +-1/sqrt((rows+cols)/2)."""

    weight: torch.nn.Parameter
    __prepare_scriptable__ = refuse_scripting

    def __init__(self, *shape: int, device: DeviceLike, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        rows, cols = self.weight.shape[-2:]
        bound = ((rows + cols) / 2) ** -0.5
        self.uniform_(-bound, bound)

    def uniform_(self, a: float = 0.0, b: float = 1.0) -> Tensor:
        """Fills the weight from [a, b), in place."""
        return torch.nn.init.uniform_(self.weight, a, b)

    def normal_(self, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Fills the weight from a normal distribution, in place."""
        return torch.nn.init.normal_(self.weight, mean, std)

    def sizes(self) -> dict[str, int]:
        """The sizes that are printed before precision and memory."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        sizes = "".join(f"{name}={size}, " for name, size in self.sizes().items())
        dtype = self.weight.dtype
        precision = PRECISIONS.get(dtype, str(dtype).removeprefix("torch."))
        mebibytes = round(self.weight.nelement() * self.weight.element_size() / 2**20, 4)
        # "MB" is how the closed module and its clients print it; they count 2^20 bytes.
        return f"{sizes}precision={precision}, size={mebibytes} MB"


class Rotary(torch.nn.Module):
    """Rotary position embedding: rotates channels i and i + D/2 by position * base^(-2i/D) (Su et al. 2021).

    Args:
        dim: D, even. context: the longest sequence. The buffers cos and sin are (context, D/2).

    In the forward x is (..,S,D), at positions (S,), by default 0 to S - 1.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, dim: int, context: int, base: float = 1e4, *, device: DeviceLike = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"Rotary: dim must be even, got {dim}")
        angles = angles_at(torch.arange(context, device=device, dtype=torch.float32), dim, base)
        dtype = dtype or torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        rows = slice(x.shape[-2]) if positions is None else positions
        # Under autocast dtypes differ.
        cos, sin = (table[rows].to(x.dtype) for table in (self.cos, self.sin))
        return rotated(x, cos, sin)


def angles_at(positions: Tensor, dim: int, base: float) -> Tensor:
    """positions (..) -> (..,D/2), the angle of channels i and i + D/2, in the dtype of positions"""
    frequencies = base ** -(torch.arange(0, dim, 2, device=positions.device, dtype=positions.dtype) / dim)
    return positions[..., None] * frequencies


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..,D) with channels i and i + D/2 rotated by an angle whose cos and sin are (..,D/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def positions_within(cu_seqlens: Tensor, tokens: Tensor, first: Tensor | None = None) -> Tensor:
    """cu_seqlens (N+1,), tokens (1,S,..) -> (S,), the position of each token in its own document.

    first: (N,), the position of the first token of each document; 0 by default.
    """
    cu_seqlens = cu_seqlens.to(tokens.device)
    packed = torch.arange(tokens.shape[1], device=tokens.device, dtype=cu_seqlens.dtype)
    starts = cu_seqlens if first is None else cu_seqlens - torch.nn.functional.pad(first, (0, 1))
    return packed - starts[torch.searchsorted(cu_seqlens[1:], packed, right=True)]
