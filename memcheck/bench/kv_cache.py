"""What the decoding states of a whole model take, such as its KV cache, and how many sequences fit on a device."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from memcheck.bench.case_predictions import predict_case
from memcheck.bench.catalog import CONTENDERS
from memcheck.bench.decode import Decoding, cached, grouped, in_place, one_token
from memcheck.core.case import Case
from memcheck.core.devices import Device
from memcheck.core.errors import UnsupportedError, UsageError
from memcheck.core.options import named
from memcheck.core.place import Place, as_place
from memcheck.core.tensors import tensors_in
from memcheck.core.workload import Workload
from memcheck.predict.api import Search
from memcheck.predict.replay import Prediction


@dataclass(frozen=True)
class CachedModel:
    """Attention layers that decode, each with a state of its own.

    case: one layer in decode mode. Its heads are those of the queries, and dim is heads times the size of a head.
    kv_heads: heads of keys and values, each of which serves heads / kv_heads queries; None: as many as heads.
    block_size: positions per block of a paged cache. A sequence takes whole blocks.
    concatenates: a step makes a new cache beside the old one, as torch.cat does, in place of writing into it.
    weights_bytes: what the model's weights take beside the states.

    UsageError: the operator has no decoding step, or does not have what an argument is about.
    """

    case: Case
    kv_heads: int | None = None
    layers: int = 1
    block_size: int = 1
    concatenates: bool = False
    weights_bytes: int = 0

    def __post_init__(self) -> None:
        name, heads = self.case.operator, self.case.heads
        if CONTENDERS[name].decode is None:
            raise UsageError(f"{named('attention_type')} {name} has no decoding step")
        if self.kv_heads is not None and (heads is None or heads % self.kv_heads):
            words = f"{heads} heads" if heads else "no heads"
            rule = f"must divide {named('heads')}, got {self.kv_heads}"
            raise UsageError(f"{named('kv_heads')} {rule}, and {name} has {words}")
        if self.decoding.attend is None and (self.block_size > 1 or self.concatenates):
            flag = named("concatenate") if self.concatenates else named("block_size")
            raise UsageError(f"{flag} is for a cache of keys and values, which {name} does not have")

    @property
    def decoding(self) -> Decoding:
        decoding = CONTENDERS[self.case.operator].decode
        assert decoding is not None
        return decoding

    def layer(self, bsz: int) -> Case:
        """One layer with so many sequences, in whole blocks."""
        blocks = -(-self.case.size("kv_len") // self.block_size)
        return dataclasses.replace(self.case, bsz=bsz, kv_len=blocks * self.block_size)

    def state_bytes(self, bsz: int = 1) -> int:
        """The states of all layers, for so many sequences."""
        return self.layers * bytes_of_state(self.layer(1), self.kv_heads) * bsz

    @property
    def bytes_per_token(self) -> float:
        """Bytes that each token adds to the states of a sequence, averaged over many tokens. 0 if they do not grow."""
        more = self.block_size * (self.case.factor or 1)
        layer = self.layer(1)
        longer = dataclasses.replace(layer, kv_len=layer.size("kv_len") + more)
        return self.layers * (bytes_of_state(longer, self.kv_heads) - bytes_of_state(layer, self.kv_heads)) / more

    def bytes_beside(self, bsz: int) -> int:
        """The weights, and the states of the layers that do not run at the moment."""
        return self.weights_bytes + self.state_bytes(bsz) // self.layers * (self.layers - 1)

    def predict_step(self, place: Place | Device, bsz: int | None = None) -> Prediction:
        """The prediction of one layer's step on what the rest of the model leaves of the device.

        So its status says whether the whole model fits. bsz: sequences; those of the case by default.
        """
        place = as_place(place)
        device = place.for_device
        case = self.layer(self.case.bsz if bsz is None else bsz)
        beside = self.bytes_beside(case.bsz)
        usable, limit = (
            None if room is None else max(room - beside, 1) for room in (device.usable_bytes, place.limit_bytes)
        )
        left = dataclasses.replace(place, device=dataclasses.replace(device, usable_bytes=usable), memory_limit=limit)
        step = functools.partial(step_workload, kv_heads=self.kv_heads, concatenates=self.concatenates)
        return predict_case(case, left, make=step)

    def need_bytes(self, place: Place | Device) -> int | None:
        """The weights, all states and the step of one layer. None if a step is not predicted."""
        peak = self.predict_step(as_place(place).unlimited).record.forward_peak_bytes
        return None if peak is None else self.bytes_beside(self.case.bsz) + peak

    def most_sequences(self, place: Place | Device) -> int | None:
        """The largest number of sequences that fits. None if there is no limit."""
        place = as_place(place).resolved()
        if (room := place.room_bytes) is None:
            return None
        most = (room - self.weights_bytes) // self.state_bytes()
        if most < 1:
            return 0

        def predict(bsz: int) -> Prediction:
            return self.predict_step(place, bsz)

        return Search(predict, 1, most).largest(most).size


def key_case(case: Case, kv_heads: int | None) -> Case:
    """The case with the heads of keys and values."""
    if kv_heads is None or case.heads is None:
        return case
    return dataclasses.replace(case, heads=kv_heads, dim=case.dim // case.heads * kv_heads)


@functools.lru_cache
def bytes_of_state(case: Case, kv_heads: int | None) -> int:
    """The state of one layer."""
    decoding = CONTENDERS[case.operator].decode
    assert decoding is not None
    state = decoding.state(dataclasses.replace(key_case(case, kv_heads), device="meta"))
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(state))


def step_workload(case: Case, *, kv_heads: int | None, concatenates: bool) -> Workload:
    """The step of one layer. The new token's key and value are the last of the cache's T unless it concatenates."""
    contender, keys = CONTENDERS[case.operator], key_case(case, kv_heads)
    decoding = contender.decode
    if decoding is None:
        raise UnsupportedError(f"{case.operator} has no decoding step")
    (q, *_), (_, k, v) = contender.inputs(one_token(case)), contender.inputs(one_token(keys))
    step, state = decoding.step(case), decoding.state(keys)
    if decoding.attend is not None:
        step = (cached if concatenates else in_place)(grouped(decoding.attend))(case)
    return Workload(case, step, (q, k, v, state), ((), ()), ("q", "k", "v", "state"), state)
