"""Flags that select the device of a prediction, shared by every command that predicts."""

from __future__ import annotations

import argparse

import torch

from memcheck.core.devices import DEVICES, Device, device_named, this_gpu
from memcheck.core.errors import UsageError


def add_device_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}; cpu; a size such as 40GiB; default: the GPU of this machine, else cpu",
    )
    add_gpu_argument(parser)


def add_gpu_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--device-from-this-gpu",
        type=gpu_index,
        nargs="?",
        const=0,
        metavar="N",
        help="GPU N (0) of this machine, with what is free on it now",
    )


def gpu_index(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--device-from-this-gpu must be the number of a GPU, got {text!r}")
    return int(text)


def predicted_device(args: argparse.Namespace) -> Device:
    """The device that the flags select."""
    if args.device_from_this_gpu is None:
        return device_named(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.device is not None:
        raise UsageError(f"--device {args.device} and --device-from-this-gpu exclude each other")
    return this_gpu(args.device_from_this_gpu)
