"""Memory for the blocks of states of compressed attention, which grows while decoding.

The blocks of a state are the first of a longer tensor, its room, and the state after it has one block more of the same
room. Only the first state after another one gets its room: a second one copies the blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_ROOM = 8  # places for blocks


class Room(NamedTuple):
    """Memory for blocks of a state, (B,Hkv,places,D) each."""

    kc: Tensor
    vc: Tensor
    of_kc: weakref.ref[Tensor]  # the state's tensors
    of_vc: weakref.ref[Tensor]
    start: int  # the place of the first

    def has(self, places: int) -> bool:
        """Whether so many places can be written: tensors of inference mode only in that mode."""
        return self.kc.shape[2] >= places and self.kc.is_inference() == torch.is_inference_mode_enabled()


ROOMS: dict[int, Room] = {}  # of the newest states, by the id of their kc


def memory_after(kc: Tensor, vc: Tensor, more: int) -> tuple[Tensor, Tensor, int]:
    """Memory that has kc and vc and places for more behind them, and the place of the first."""
    count = kc.shape[2] + more
    room = None if torch.jit.is_tracing() else ROOMS.pop(id(kc), None)
    if room is not None and room.of_kc() is kc and room.of_vc() is vc and room.has(room.start + count):
        return room.kc, room.vc, room.start
    places = count + max(count // 2, LEAST_ROOM)
    copies = [x.new_empty(*x.shape[:2], places, *x.shape[3:]) for x in (kc, vc)]
    for x, copy in zip((kc, vc), copies, strict=True):
        copy[:, :, : x.shape[2]] = x
    return copies[0], copies[1], 0


def blocks_in(room: Sequence[Tensor], count: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """`count` blocks of a room, which the next state gets with them."""
    kc, vc = places_in(room, start, count)
    key = id(kc)
    ROOMS[key] = Room(room[0], room[1], weakref.ref(kc, lambda _: ROOMS.pop(key, None)), weakref.ref(vc), start)
    return kc, vc


def places_in(room: Sequence[Tensor], start: int, count: int) -> tuple[Tensor, Tensor]:
    """Views of a room that autograd may keep: a room is written behind its views only, and keeps its version."""
    B, Hkv, _, D = room[0].shape
    where = (B, Hkv, count, D), room[0].stride(), start * D
    return room[0].as_strided(*where), room[1].as_strided(*where)


def write(room: Sequence[Tensor], first: int, new: Sequence[Tensor]) -> None:
    """Writes new (B,Hkv,n,D) to a room from a place on."""
    for x, more in zip(room, new, strict=True):
        x.data.narrow(2, first, more.shape[2]).copy_(more)


def appended(old: Sequence[Tensor], new: Sequence[Tensor], in_place: bool) -> tuple[Tensor, Tensor]:
    """kc and vc (B,Hkv,C,D) of the old blocks and then the new ones. in_place: in memory that they may share."""
    (kc, vc), (new_kc, new_vc) = old, new
    count, more = kc.shape[2], new_kc.shape[2]
    if not (count and more):
        return (kc, vc) if count else (new_kc, new_vc)
    if not in_place:
        return torch.cat([kc, new_kc], 2), torch.cat([vc, new_vc], 2)
    *room, start = memory_after(kc, vc, more)
    write(room, start + count, new)
    return blocks_in(room, count + more, start)
