"""Values of flags, and the device of a prediction. Nothing here imports torch unless a device is looked up."""

from __future__ import annotations

import argparse
import math
from collections.abc import Container
from pathlib import Path

from memcheck.core.devices import DEVICES, Device, device_named, this_gpu
from memcheck.core.errors import UsageError
from memcheck.core.units import Growth, parse_bytes, parse_growth, parse_sizes

# Names that help texts list. The modules that define them import torch; a test compares them.
ATTENTION_TYPES = (
    *("naive", "naive-compiled", "softmax", "softmax/math", "softmax/flash", "softmax/efficient", "softmax/cudnn"),
    *("flex", "softplus", "linear", "linear-causal", "linear-cumsum", "compressed"),
    *("memcheck-pyt/naive", "memcheck-pyt/softmax", "memcheck-pyt/softplus", "cs336/naive"),
)
COMBINATOR_TYPES = ("combinator", "combinator-low-memory", "memcheck-pyt/combinator")
DECODER_TYPES = ("naive", "softmax", "linear", "compressed", "softplus")  # Of memcheck.nn.Decoder.
MODES = ("train", "inference", "decode")
# The defaults of the commands that compare attentions.
DEFAULT_TYPES = ["naive", "softmax", "softplus", "linear-causal", "compressed"]
DEFAULT_SIZES = {"bsz": 1, "dim": 256, "heads": 4}
# On a GPU, the sizes of a layer of a language model.
GPU_SIZES = {"bsz": 4, "dim": 2048, "heads": 16}
GPU_LENGTHS = [512, 1024, 2048, 4096, 8192]
GPU_DTYPE = "bfloat16"


def count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    if number >= 2**63:
        raise argparse.ArgumentTypeError(f"must be below 2^63, got {number}")
    return number


def ordinal(text: str) -> int:
    """Parses a number that may be 0."""
    return 0 if text.strip() == "0" else count(text)


def counts(text: str) -> list[int]:
    return [count(word) for word in text.split(",")]


def sizes(text: str) -> list[int]:
    """Parses lists and ranges: "8", "16,32", "256:16384:x2"."""
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """Parses bytes: "40GiB"."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def growth(text: str) -> Growth:
    """Parses how much a figure may grow: "5%", "4KiB"."""
    try:
        return parse_growth(text)
    except ValueError as error:
        words = str(error).replace("must look like ", "must look like 5%, ")
        raise argparse.ArgumentTypeError(words) from None


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return number


def version(text: str) -> tuple[int, int]:
    """Parses a version of torch: "2.13"."""
    from memcheck.predict.torch_versions import version_given

    try:
        return version_given(text, "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).strip().replace("'2.13', '2.13.0' or (2, 13)", "2.13")) from None


def norm(text: str) -> float:
    """Parses a norm that gradients are clipped to."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be a number that is not negative, got {text!r}")
    return number


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must name a folder, got ''")
    return Path(text)


def file(text: str) -> Path:
    if not text or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must name a file, got {text!r}")
    return Path(text)


def reference(text: str) -> str:
    """Checks the form "package.module:function" or "FILE.py:function"."""
    place, colon, name = text.rpartition(":")
    if not (place and colon and all(word.isidentifier() for word in name.split("."))):
        raise argparse.ArgumentTypeError(f"must look like package.module:function or FILE.py:function, got {text!r}")
    return text


def gpu_index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be the number of a GPU, got {text!r}")
    return int(text)


def make_lengths(
    mode: str | None,
    seq_len: list[int] | None,
    query_len: list[int] | None,
    kv_len: list[int] | None,
    *,
    default: list[int],
) -> list[tuple[int, int]]:
    """(S, T) pairs. Two lists of equal length are paired; a single length is combined with every one of the other list.

    A decoding step takes one token, so S is 1 and the lengths are those of the state.
    """
    if seq_len and (query_len or kv_len):
        raise UsageError("--seq-len sets both lengths: leave out --query-len and --kv-len, or --seq-len")
    if mode == "decode":
        if query_len not in (None, [1]):
            given = ",".join(map(str, query_len))
            raise UsageError(
                f"--query-len must be 1 in --mode decode, got {given}; --kv-len says how many tokens the state holds"
            )
        return [(1, key) for key in sorted(kv_len or seq_len or default)]
    queries, keys = query_len or kv_len or seq_len or default, kv_len or query_len or seq_len or default
    longest = max(len(queries), len(keys))
    if {len(queries), len(keys)} - {1, longest}:
        raise UsageError(f"--query-len and --kv-len must be as long as each other, got {len(queries)} and {len(keys)}")
    return sorted(zip(queries * (longest // len(queries)), keys * (longest // len(keys)), strict=True))


def add_device_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the flags that select the device of a prediction."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}, cpu, or a size such as 40GiB; default: this machine's GPU, else its CPU",
    )
    add_gpu_argument(parser)


def add_gpu_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device-from-this-gpu",
        type=gpu_index,
        nargs="?",
        const=0,
        metavar="N",
        help="this machine's GPU N (0), with the memory that is free on it now",
    )


def gpu_words(given: Container[str]) -> str:
    """Says which defaults of a GPU hold for the flags that are not given. "" if all are given."""
    words = {
        "dtype": "bf16",
        "bsz": f"batch {GPU_SIZES['bsz']}",
        "dim": f"dim {GPU_SIZES['dim']}",
        "heads": f"{GPU_SIZES['heads']} heads",
        "seq_len": f"lengths {GPU_LENGTHS[0]} to {GPU_LENGTHS[-1]}",
    }
    used = ", ".join(text for name, text in words.items() if name not in given)
    return f"defaults of a GPU, where no flag says otherwise: {used}" if used else ""


def predicted_device(args: argparse.Namespace) -> Device:
    """The device that the flags select."""
    if args.device_from_this_gpu is not None:
        if args.device is not None:
            raise UsageError(f"--device {args.device} and --device-from-this-gpu exclude each other")
        return this_gpu(args.device_from_this_gpu)
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    return device_named(default if args.device is None else args.device)
