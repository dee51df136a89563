"""Baselines of Liger-Kernel's benchmark table: plain PyTorch, and Hugging Face's layers.

What each script does was read in linkedin/Liger-Kernel, benchmark/scripts and test/chunked_loss at the date of the row.
All of them measure the median of ten iterations by torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place

from .scripts import Script, predict_script, use_cublas

Config = dict[str, Any]


def of_config(text: str) -> Config:
    """'V=4096 {"B": 8}' becomes {"V": 4096, "B": 8}, with dtypes of torch."""
    first, _, rest = text.partition(" ")
    name, _, value = first.partition("=")
    config = json.loads(rest) | {name: int(value)}
    if "dtype" in config:
        config["dtype"] = getattr(torch, config["dtype"].removeprefix("torch."))
    return config


class Layer(Script):
    """A forward of a layer, and its backward from a gradient.

    mode: "full" has both in an iteration; "forward" and "backward" only one of them. fresh: makes the gradient anew in
    each iteration. others: what is alive besides, such as the layer it is compared with.
    """

    def __init__(
        self,
        layer: nn.Module,
        inputs: tuple[Tensor, ...],
        mode: str = "full",
        fresh: Callable[[Tensor], Tensor] | None = None,
        others: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.mode, self.fresh, self.others = layer, mode, fresh, others
        self.inputs = nn.ParameterList(inputs)
        self.gradient: Tensor | None = None

    def prepare(self) -> None:
        if self.mode == "forward":
            # Speeds were measured before, with a backward.
            use_cublas()
        if self.mode == "backward":
            # The scripts make the gradient first.
            self.gradient = torch.randn_like(self.inputs[0])
            self.output = self.layer(*self.inputs)
        elif self.mode == "full" and self.fresh is None:
            self.gradient = torch.randn_like(self.inputs[0])

    def iteration(self) -> None:
        if self.mode == "backward":
            self.output.backward(self.gradient, retain_graph=True)
            return
        y = self.layer(*self.inputs)
        if self.mode == "full":
            y.backward(self.gradient if self.fresh is None else self.fresh(y), retain_graph=True)


class Loss(Script):
    """A loss and its backward. inputs: the first one needs a gradient."""

    def __init__(self, loss: nn.Module, *inputs: Tensor, keep_graph: bool = False, others: nn.Module | None = None):
        super().__init__()
        self.loss, self.keep_graph, self.others = loss, keep_graph, others
        self.x = nn.Parameter(inputs[0])
        for number, tensor in enumerate(inputs[1:]):
            self.register_buffer(f"given_{number}", tensor)

    def given(self) -> list[Tensor]:
        return list(self.buffers(recurse=False))

    def iteration(self) -> None:
        y = self.loss(self.x, *self.given())
        y.backward(retain_graph=self.keep_graph)


class LossOfProbabilities(Loss):
    """A loss of log-probabilities or probabilities, which a script makes once of random numbers."""

    def __init__(self, loss: nn.Module, shape: tuple[int, int], made_by: tuple[Callable[..., Tensor], ...]) -> None:
        super().__init__(loss, torch.empty(shape), keep_graph=True)
        self.shape, self.made_by = shape, made_by

    def prepare(self) -> None:
        self.probabilities = self.made_by[0](self.x, dim=-1)
        self.target = self.made_by[1](torch.randn(self.shape, device="cuda"), dim=-1)

    def iteration(self) -> None:
        y = self.loss(self.probabilities, self.target)
        y.backward(retain_graph=self.keep_graph)


# Losses of a linear head.


class HeadLoss(nn.Module):
    """Logits of a linear head and the cross entropy of them."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head = nn.Linear(c["H"], c["V"], bias=False, dtype=c["dtype"])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x), target)


class JensenShannon(nn.Module):
    """The Jensen-Shannon divergence of log-probabilities p and q, whose mean is half of both."""

    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        mean = 0.5 * (torch.exp(p) + torch.exp(q))
        log_mean = torch.log(mean)
        divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)
        return 0.5 * (divergence(log_mean, p) + divergence(log_mean, q))


class HeadJensenShannon(nn.Module):
    """The divergence of the logits of a student and a teacher, in float32."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Linear(c["H"], c["V"], bias=False, dtype=c["dtype"]) for _ in range(2))

    def forward(self, x: Tensor, teacher_x: Tensor) -> Tensor:
        student, teacher = self.student(x), self.teacher(teacher_x)
        student_log = torch.log_softmax(student / 1.0, dim=-1)
        teacher_log = torch.log_softmax(teacher / 1.0, dim=-1)
        return self.divergence(student_log, teacher_log)

    def divergence(self, q: Tensor, p: Tensor) -> Tensor:
        dtype = q.dtype
        p, q = p.float(), q.float()
        mean = torch.lerp(torch.exp(p), torch.exp(q), 0.5)
        kl = nn.KLDivLoss(reduction="batchmean", log_target=True)
        return (0.5 * kl(torch.log(mean), p) + 0.5 * kl(torch.log(mean), q)).to(dtype)


class HeadPreference(nn.Module):
    """A loss of preferences: the first half of the batch is chosen, the second one rejected.

    kind: "orpo", "cpo" or "simpo". wide: logits become float32.
    """

    def __init__(self, c: Config, kind: str, wide: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(c["H"], c["V"], bias=False, dtype=c["dtype"])
        self.kind, self.wide = kind, wide

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        half = x.shape[0] // 2
        # The results of this call live until the loss is computed.
        *kept, nll = self.scores(x, target, half)
        chosen, rejected = kept[:2]
        return nll - self.preference(chosen, rejected).mean()

    def scores(self, x: Tensor, target: Tensor, half: int) -> tuple[Tensor, ...]:
        product = x @ self.head.weight.t()
        logits = product.float() if self.wide else product
        nll = functional.cross_entropy(logits[:half].view(-1, logits.shape[-1]), target[:half].view(-1))
        means = self.mean_log_probability(logits, target)
        return means[:half], means[half:], logits[:half], logits[half:], nll

    def mean_log_probability(self, logits: Tensor, labels: Tensor) -> Tensor:
        counts = labels != -100
        labels = torch.where(labels == -100, 0, labels)
        tokens = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return (tokens * counts).sum(-1) / counts.sum(-1)

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        if self.kind == "orpo":
            odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
            return 0.1 * functional.logsigmoid(odds)
        difference = chosen - rejected
        if self.kind == "cpo":
            return functional.logsigmoid(0.1 * difference) * 1.0 + functional.logsigmoid(-0.1 * difference) * 0.0
        difference = difference - 0.5 / 0.1
        return functional.logsigmoid(0.1 * difference) * 1.0 + functional.logsigmoid(-0.1 * difference) * 0.0


class Distillation(nn.Module):
    """Half the cross entropy of a student and half a divergence from a teacher. The student is half as wide.

    divides_in_place: as the script does since 2025.
    """

    divides_in_place = True

    def __init__(self, c: Config, divergence: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.student = nn.Linear(c["H"] // 2, c["V"], bias=False, dtype=c["dtype"])
        self.teacher = nn.Linear(c["H"], c["V"], bias=False, dtype=c["dtype"])
        self.divergence = divergence

    def forward(self, x: Tensor, teacher_x: Tensor, target: Tensor) -> Tensor:
        found = self.logits(x, teacher_x, target)  # Alive until the loss is there.
        student, teacher, hard = found
        if self.divides_in_place:
            student /= 1.0
            teacher /= 1.0
        else:
            student = student / 1.0
            teacher = teacher / 1.0
        soft = self.divergence(student, teacher)
        return 0.5 * hard + 0.5 * soft

    def logits(self, x: Tensor, teacher_x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        student = x @ self.student.weight.t()
        with torch.no_grad():
            teacher = teacher_x @ self.teacher.weight.t()
        student_logits, teacher_logits = student.float(), teacher.float()
        return student_logits, teacher_logits, functional.cross_entropy(student_logits, target)


def jensen_shannon_of_logits(student: Tensor, teacher: Tensor) -> Tensor:
    student_log, teacher_log = functional.log_softmax(student, dim=-1), functional.log_softmax(teacher, dim=-1)
    mean = 0.5 * student_log.exp() + 0.5 * teacher_log.exp()
    log_mean = mean.log()
    of_student = functional.kl_div(log_mean, student_log, reduction="batchmean", log_target=True)
    of_teacher = functional.kl_div(log_mean, teacher_log, reduction="batchmean", log_target=True)
    return 0.5 * of_teacher + 0.5 * of_student


def cosine_of_logits(student: Tensor, teacher: Tensor) -> Tensor:
    student_unit, teacher_unit = functional.normalize(student, p=2, dim=-1), functional.normalize(teacher, p=2, dim=-1)
    similarity = functional.cosine_similarity(student_unit, teacher_unit, dim=-1)
    loss = 1.0 * (1 - similarity)
    return loss.mean()


class HeadPolicy(nn.Module):
    """The loss of GRPO with a reference model. by_sequence: ratios are those of sequences, not of tokens."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head, self.reference = (nn.Linear(c["H"], c["V"], bias=False, dtype=c["dtype"]) for _ in range(2))
        self.by_sequence = c["importance_sampling_level"] == "sequence"

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor, reference_x: Tensor) -> Tensor:
        logits = x @ self.head.weight.t()
        log = functional.log_softmax(logits.float(), dim=-1)
        tokens = log.gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = reference_x @ self.reference.weight.t()
            reference_log = functional.log_softmax(reference_logits.float(), dim=-1)
            reference = reference_log.gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
        ratio = tokens - tokens.detach()
        if self.by_sequence:
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        weight = torch.exp(ratio)
        clipped = torch.clamp(weight, 0.8, 1.2)
        loss = -torch.min(weight * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
        kl = torch.exp(reference - tokens) - (reference - tokens) - 1.0
        loss = loss + 0.1 * kl
        return (loss * mask).sum() / torch.clamp(mask.sum(), min=1.0)


# Layers.


class GatedMLP(nn.Module):
    """The feed-forward of a Llama."""

    def __init__(self, hidden: int, intermediate: int, activation: nn.Module) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class ConvolvedScores(nn.Module):
    """Causal softmax of scores (B,C,L,L), then a convolution over them. sparse: sparsemax in float32 instead."""

    def __init__(self, c: Config, sparse: bool = False) -> None:
        super().__init__()
        edge = c["K"]
        self.weight = nn.Parameter(torch.empty(c["C_out"], c["C_in"] // c["groups"], edge, edge, dtype=c["dtype"]))
        self.bias = nn.Parameter(torch.empty(c["C_out"], dtype=c["dtype"]))
        self.padding, self.groups, self.sparse = edge // 2, c["groups"], sparse

    def forward(self, scores: Tensor) -> Tensor:
        length, dtype = scores.shape[-1], torch.float32 if self.sparse else scores.dtype
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device=scores.device)).view(1, 1, length, length)
        low = torch.tensor(-1e9, device=scores.device, dtype=dtype)
        zero = torch.tensor(0.0, device=scores.device, dtype=dtype)
        wide = scores.to(dtype)
        masked = wide.masked_fill(~mask, low)
        if self.sparse:
            # The names live until the call ends.
            ordered, _ = torch.sort(masked, dim=-1, descending=True)
            sums = torch.cumsum(ordered, dim=-1)
            places = torch.arange(1, length + 1, device=scores.device, dtype=dtype).view(1, 1, 1, length)
            positive = ordered > -1e8
            condition = (1 + places * ordered > sums) & positive
            count = torch.sum(condition, dim=-1, keepdim=True)
            at_least_one = torch.max(count, torch.ones_like(count))
            last = torch.gather(sums, dim=-1, index=at_least_one.long() - 1)
            level = (last - 1) / at_least_one.to(dtype)
            level = torch.where(count == 0, torch.full_like(level, float("inf")), level)
            weights = torch.clamp(masked - level, min=0)
        else:
            weights = functional.softmax(masked, dim=-1)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        mixed = functional.conv2d(weights, weight, bias, stride=1, padding=self.padding, groups=self.groups)
        return mixed.masked_fill(~mask, zero).to(scores.dtype)


class Neighborhood(nn.Module):
    """Attention within a window, by a mask over all scores."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, size = c["num_heads"], c["hidden_size"]
        self.q, self.k, self.v, self.out = (nn.Linear(size, size, bias=c["bias"]) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1.0 / math.sqrt(size // self.heads))
        mask = torch.zeros(length, length, device=x.device, dtype=torch.bool)  # Filled one by one in place.
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v)
        mixed = mixed.transpose(1, 2).contiguous().view(batch, length, size)
        return self.out(mixed)


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        positive = functional.relu(x)
        return torch.square(positive)


class AddedNorm(Script):
    """A residual sum in float32 and its RMS norm. Both results have gradients, and the graph is not kept."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        shape, size, dtype = (c["M"], c["H"]), c["H"], c["dtype"]
        self.weight = nn.Parameter(torch.ones(size))
        # Two layers that the script compares with this one.
        self.others = nn.ParameterList(torch.ones(size) for _ in range(3))
        self.x, self.residual = (nn.Parameter(torch.empty(shape, dtype=dtype)) for _ in range(2))
        for name in ("dy", "ds"):
            self.register_buffer(name, torch.empty(shape, dtype=dtype))

    def norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        dtype = x.dtype
        x = x.to(torch.float32)
        residual = residual.to(torch.float32)
        x = x + residual
        residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype), residual.to(dtype)

    def iteration(self) -> None:
        y, s = self.norm(self.x, self.residual)
        torch.autograd.backward([y, s], [self.dy, self.ds])


class Rotation(Script):
    """Rotary embeddings of queries and keys. interleaved: by complex numbers, as Llama 4."""

    def __init__(self, c: Config, interleaved: bool = False) -> None:
        super().__init__()
        length = c.get("seq_len", c.get("T"))
        hidden = c.get("hidden_size", c.get("H"))
        heads = c["num_q_heads"], c["num_kv_heads"]
        size = hidden // heads[0]
        shapes = [(1, length, count, size) for count in heads]
        self.q, self.k = (nn.Parameter(torch.empty(shape, dtype=c["dtype"])) for shape in shapes)
        self.interleaved, self.size, self.length = interleaved, size, length
        # A gradient of the keys is made without a dtype; it has that of the keys.
        self.register_buffer("dq", torch.empty(shapes[0], dtype=c["dtype"]))
        self.register_buffer("dk", torch.empty(shapes[1], dtype=c["dtype"]))
        self.register_buffer("frequencies", torch.empty(size // 2))
        self.register_buffer("positions", torch.empty(1, length, dtype=torch.long))
        if interleaved:
            self.register_buffer("cis", torch.empty(1, length, size // 2, dtype=torch.complex64))
        else:
            for name in ("cos", "sin"):
                self.register_buffer(name, torch.empty(1, length, size, dtype=c["dtype"]))

    def prepare(self) -> None:
        self.frequencies[None, :, None] @ self.positions[:, None, :].float()

    def iteration(self) -> None:
        if self.interleaved:
            found = self.by_complex_numbers(self.q, self.k)
            torch.autograd.grad(found, (self.q, self.k), (self.dq, self.dk), retain_graph=True)
            return
        q, k, dq, dk = (tensor.transpose(1, 2) for tensor in (self.q, self.k, self.dq, self.dk))
        found = self.by_halves(q, k)
        torch.autograd.grad(found, (q, k), (dq, dk), retain_graph=True)

    def by_halves(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        turned_q = (q * cos) + (swapped(q) * sin)
        turned_k = (k * cos) + (swapped(k) * sin)
        return turned_q, turned_k

    def by_complex_numbers(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        complex_q = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        complex_k = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
        turned_q = torch.view_as_real(complex_q * self.cis[:, :, None, :]).flatten(3)
        turned_k = torch.view_as_real(complex_k * self.cis[:, :, None, :]).flatten(3)
        return turned_q.type_as(q), turned_k.type_as(k)


def swapped(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class Experts(Script):
    """Experts of a mixture, one after another, each on its tokens. mode: as of a Layer."""

    doubts = ("how many tokens each expert gets, drawn by chance",)

    def __init__(self, c: Config, mode: str) -> None:
        super().__init__()
        self.c, self.mode = c, mode
        tokens, count, hidden, inner = c["T"], c["E"], c["H"], c["intermediate_dim"]
        self.x = nn.Parameter(torch.empty(tokens, hidden, dtype=c["dtype"]))
        # What is multiplied by 0.02: not leaves.
        self.in_leaf = nn.Parameter(torch.empty(count, 2 * inner, hidden, dtype=c["dtype"]))
        self.out_leaf = nn.Parameter(torch.empty(count, hidden, inner, dtype=c["dtype"]))
        self.weights = nn.Parameter(torch.empty(tokens, c["K"], dtype=c["dtype"]))
        self.register_buffer("chosen", torch.empty(tokens, c["K"], dtype=torch.int32))

    def prepare(self) -> None:
        self.into, self.out = self.in_leaf * 0.02, self.out_leaf * 0.02
        use_cublas()  # Speeds were measured before, with a backward.
        if self.mode == "backward":
            self.y = self.run()
            self.gradient = torch.randn_like(self.y)

    def iteration(self) -> None:
        if self.mode == "backward":
            self.y.backward(self.gradient, retain_graph=True)
            return
        y = self.run()
        if self.mode == "full":
            y.backward(torch.randn_like(y), retain_graph=True)

    def run(self) -> Tensor:
        """Experts get numbers of tokens as chance gives them; those of the published run are not known."""
        count, x = self.c["E"], self.x
        final = torch.zeros_like(x)
        with torch.no_grad():
            mask = functional.one_hot(self.chosen.long(), num_classes=count).permute(2, 1, 0)
        chance = random.Random(42)
        mean = self.c["T"] * self.c["K"] / count
        for expert in range(count):
            share = round(chance.gauss(mean, math.sqrt(mean * (1 - self.c["K"] / count))))
            tokens, places = (torch.empty(share, dtype=torch.long, device=x.device) for _ in range(2))
            rows = x[tokens]
            gate, up = functional.linear(rows, self.into[expert]).chunk(2, dim=-1)
            rows = functional.silu(gate) * up
            rows = functional.linear(rows, self.out[expert])
            rows = rows * self.weights[tokens, places, None]
            final.index_add_(0, tokens, rows.to(final.dtype))
        del mask
        return final


# Of Megatron-LM's layers.


class SummedBackward(Script):
    """A layer of one tensor, whose sum has the backward.

    given: integers that the layer is given. clears: an iteration begins without gradients.
    """

    def __init__(self, layer: Callable[..., Tensor], x: Tensor, *given: Tensor, clears: bool = False) -> None:
        super().__init__()
        self.layer, self.clears = layer, clears
        self.x = nn.Parameter(x)
        for number, tensor in enumerate(given):
            self.register_buffer(f"given_{number}", tensor)

    def iteration(self) -> None:
        if self.clears:
            self.x.grad = None
        y = self.layer(self.x, *self.buffers(recurse=False))
        y.sum().backward()


class VocabularyEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary that is split over one process, as Megatron-LM's unfused function."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float()
        highest = torch.max(logits, dim=-1)[0]
        logits -= highest.unsqueeze(dim=-1)
        outside = (target < 0) | (target >= logits.shape[-1])
        places = target.clone() - 0
        places[outside] = 0
        rows = logits.view(-1, logits.shape[-1])
        flat = places.view(-1)
        lines = torch.arange(0, rows.shape[0], device=rows.device)
        chosen = rows[lines, flat]
        chosen = chosen.clone().contiguous()
        predicted = chosen.view_as(target)
        predicted[outside] = 0.0
        exponentials = logits
        torch.exp(logits, out=exponentials)
        sums = exponentials.sum(dim=-1)
        loss = torch.log(sums) - predicted
        exponentials.div_(sums.unsqueeze(dim=-1))
        ctx.save_for_backward(exponentials, outside, flat)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        softmax, outside, flat = ctx.saved_tensors
        found = softmax
        rows = found.view(-1, softmax.shape[-1])
        lines = torch.arange(0, rows.shape[0], device=rows.device)
        update = 1.0 - outside.view(-1).float()
        rows[lines, flat] -= update
        found.mul_(gradient.unsqueeze(dim=-1))
        return found, None


# The table.


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long)


def gated(c: Config, mode: str, activation: nn.Module) -> Layer:
    batch = c.get("bsz", c.get("B"))
    layer = GatedMLP(c["hidden_size"], c["intermediate_size"], activation).to(c["dtype"])
    x = numbers(batch, c["T"], c["hidden_size"], dtype=c["dtype"])
    return Layer(layer, (x,), mode, torch.randn_like)


def head(c: Config) -> Tensor:
    """A weight of the module that the script compares with."""
    return numbers(c["V"], c["H"], dtype=c["dtype"])


def preference(c: Config, kind: str) -> Loss:
    """Rows of 4,096 tokens are from an hour before those of 1,024, and need half: their logits were not float32 yet."""
    x = numbers(c["B"], c["T"], c["H"], dtype=c["dtype"])
    others = nn.ParameterList([head(c), *kept_by_compiler(c)])
    script = Loss(HeadPreference(c, kind, wide=c["T"] == 1024), x, ids(c["B"], c["T"]), others=others)
    script.doubts = (KEPT,)
    return script


KEPT = "what torch.compile keeps of earlier runs, learned from the table's other rows"


def kept_by_compiler(c: Config) -> list[Tensor]:
    """What Liger's compiled loss left of its first two batches, of 2 and 4, which ran before.

    Learned from the table: all its rows of these losses have the same bytes more than the script makes, which are the
    weights, inputs and targets of these two, and a tensor like the second input.
    """
    inputs = [numbers(batch, c["T"], c["H"], dtype=c["dtype"]) for batch in (2, 4, 4)]
    return [head(c), head(c), *inputs, numbers(2 * c["T"] * 2), numbers(4 * c["T"] * 2), numbers(1)]


def distillation(c: Config, divergence: Callable[[Tensor, Tensor], Tensor], in_place: bool = True) -> Loss:
    others = Distillation(c, divergence)
    rows, hidden, dtype = c["BT"], c["H"], c["dtype"]
    x, teacher_x = numbers(rows, hidden // 2, dtype=dtype), numbers(rows, hidden, dtype=dtype)
    script = Loss(Distillation(c, divergence), x, teacher_x, ids(rows), others=others)
    script.loss.divides_in_place = in_place
    if not in_place:
        script.doubts = (KEPT,)
        script.kept = nn.ParameterList(kept_by_compiled_distillation(c))
    # The tensor that both students were cloned from, and the clone of the other one.
    script.copies = nn.ParameterList(numbers(rows, hidden // 2, dtype=dtype) for _ in range(2))
    return script


def kept_by_compiled_distillation(c: Config) -> list[Tensor]:
    """What Liger's compiled loss left of its first two batches, of 1,024 and 2,048 tokens.

    Learned from the table, whose rows have the same bytes more than the script makes: about those of the weights, four
    tensors like the student's weight, and the inputs.
    """
    student, teacher = (c["V"], c["H"] // 2), (c["V"], c["H"])
    shapes = [student, teacher] * 2 + [student] * 4
    shapes += [(rows, size) for rows in (1024, 2048) for size in (c["H"] // 2, c["H"])] + [(2048, c["H"])]
    return [numbers(*shape, dtype=c["dtype"]) for shape in shapes]


def policy(c: Config) -> Loss:
    batch, length, hidden, dtype = c["B"], c["T"], c["H"], c["dtype"]
    x = numbers(batch, length, hidden, dtype=dtype)
    given = ids(batch, length), numbers(batch, length), numbers(batch, dtype=dtype), torch.empty_like(x)
    return Loss(HeadPolicy(c), x, *given, others=HeadPolicy(c))


def scores(c: Config, sparse: bool = False) -> Layer:
    x = numbers(c["B"], c["C_in"], c["L"], c["L"], dtype=c["dtype"])
    return Layer(ConvolvedScores(c, sparse), (x,), others=ConvolvedScores(c))


def neighborhood(c: Config) -> Layer:
    x = numbers(c["batch_size"], c["seq_len"], c["hidden_size"])
    return Layer(Neighborhood(c), (x,), others=Neighborhood(c))


def divergence_of_heads(c: Config) -> Loss:
    x, teacher_x = (numbers(c["BT"], c["H"], dtype=c["dtype"]) for _ in range(2))
    return Loss(HeadJensenShannon(c), x, teacher_x)  # The modules share their weights.


def group_norm(c: Config, _: str) -> Layer:
    """The script measures forward and backward, whatever mode it names."""
    count = c["H"]
    groups = c["C"] // c["channels_per_group"]
    norm, other = (nn.GroupNorm(groups, c["C"], eps=c["eps"]) for _ in range(2))
    return Layer(norm, (numbers(c["M"], c["C"], count),), "full", others=other)


BASELINES: dict[str, Callable[[Config, str], Script]] = {
    "cross_entropy": lambda c, _: Loss(nn.CrossEntropyLoss(), numbers(c["B"] * c["T"], c["V"]), ids(c["B"] * c["T"])),
    "embedding": lambda c, _: Embedded(c),
    "fused_linear_cross_entropy": lambda c, _: Loss(
        HeadLoss(c), numbers(c["BT"], c["H"], dtype=c["dtype"]), ids(c["BT"]), others=HeadLoss(c)
    ),
    "geglu": lambda c, mode: gated(c, mode, nn.GELU(approximate="tanh")),
    "swiglu": lambda c, mode: gated(c, mode, nn.SiLU()),
    "tiled_geglu": lambda c, mode: gated(c, mode, nn.GELU(approximate="tanh")),
    "tiled_swiglu": lambda c, mode: gated(c, mode, nn.SiLU()),
    "rope": lambda c, _: Rotation(c),
    "llama4_rope": lambda c, _: Rotation(c, interleaved=True),
    "kl_div": lambda c, _: LossOfProbabilities(
        nn.KLDivLoss(reduction="batchmean"), (c["B"] * c["T"], c["V"]), (torch.log_softmax, torch.softmax)
    ),
    "jsd": lambda c, _: LossOfProbabilities(
        JensenShannon(), (c["B"] * c["T"], c["V"]), (torch.log_softmax, torch.log_softmax)
    ),
    "tvd": lambda c, _: LossOfProbabilities(
        TotalVariation(), (c["B"] * c["T"], c["V"]), (torch.softmax, torch.softmax)
    ),
    "fused_linear_jsd": lambda c, _: divergence_of_heads(c),
    "fused_linear_orpo_loss": lambda c, _: preference(c, "orpo"),
    "fused_linear_cpo_loss": lambda c, _: preference(c, "cpo"),
    "fused_linear_simpo_loss": lambda c, _: preference(c, "simpo"),
    "distill_jsd_loss": lambda c, _: distillation(c, jensen_shannon_of_logits, in_place=False),
    "distill_cosine_loss": lambda c, _: distillation(c, cosine_of_logits),
    "fused_linear_grpo_loss_token": lambda c, _: policy(c),
    "fused_linear_grpo_loss_sequence": lambda c, _: policy(c),
    "multi_token_attention": lambda c, _: scores(c),
    "sparse_multi_token_attention": lambda c, _: scores(c, sparse=True),
    "softmax": lambda c, mode: Layer(nn.Softmax(dim=-1), (numbers(c["N"], dtype=c["dtype"]),), mode, torch.ones_like),
    "fused_neighborhood_attention": lambda c, _: neighborhood(c),
    "layer_norm": lambda c, mode: Layer(
        nn.LayerNorm(c["N"], eps=c["eps"]), (numbers(c["M"], c["N"]),), mode, others=nn.LayerNorm(c["N"])
    ),
    "group_norm": group_norm,
    "relu_squared": lambda c, mode: Layer(SquaredReLU(), (numbers(c["N"], dtype=c["dtype"]),), mode, torch.ones_like),
    "fused_add_rms_norm": lambda c, _: AddedNorm(c),
    "fused_moe": Experts,
    "megatron_rms_norm": lambda c, _: SummedBackward(
        nn.RMSNorm(c["H"], eps=1e-6, dtype=torch.bfloat16), numbers(c["S"], c["B"], c["H"], dtype=torch.bfloat16)
    ),
    "megatron_cross_entropy": lambda c, _: SummedBackward(
        VocabularyEntropy.apply,
        numbers(c["S"], c["B"], c["V"], dtype=torch.bfloat16),
        ids(c["S"], c["B"]),
        clears=True,
    ),
}


class TotalVariation(nn.Module):
    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        distance = torch.abs(p - q) / 2.0
        return torch.sum(distance) / p.size(0)


class Embedded(Script):
    """An embedding, beside the one it is compared with. Its gradient is made anew in each iteration.

    kept: of each of the eight compiled embeddings of the table with vectors of 4,096 numbers, about three tensors are
    left. That was learned from the table, whose rows have as much more than the script makes.
    """

    doubts = (KEPT,)

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.kept = nn.ParameterList(numbers(1024 * 2**power, 4096) for power in range(8) for _ in range(3))
        self.layer, self.other = (nn.Embedding(c["V"], c["D"], dtype=c["dtype"]) for _ in range(2))
        self.register_buffer("ids", ids(c["B"], c["T"]))

    def iteration(self) -> None:
        y = self.layer(self.ids)
        y.backward(torch.randn_like(y))


def predict(name: str, config: str, mode: str, place: Place) -> Prediction:
    """The prediction of a kernel's baseline, of its sizes, and of "forward", "backward" or "full"."""
    with torch.device("meta"):
        script = BASELINES[name](of_config(config), mode)
    prediction = predict_script(script, place)
    if (size := prediction.record.max_allocated_bytes) is None:
        return prediction
    # The scripts put the MiB into a tensor of float32.
    rounded = int(torch.tensor(size / 2**20, dtype=torch.float32).item() * 2**20)
    return dataclasses.replace(prediction, record=dataclasses.replace(prediction.record, max_allocated_bytes=rounded))
