"""Converters of options: each takes a text of the command line or a value of Python, and returns the option's value.

ValueError: the value breaks the rule, which the message says without the option's name: "must be at least 1, got 0".
Nothing here imports torch at its start.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from memcheck.core.errors import did_you_mean, spelled_as, unknown
from memcheck.core.units import Growth, parse_bytes, parse_growth, parse_sizes

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
# Optimizers by name: the class in torch.optim, and options.
OPTIMIZERS: dict[str, tuple[str, dict[str, float]] | None] = {
    "none": None,
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "adagrad": ("Adagrad", {}),
    "adafactor": ("Adafactor", {}),
    "rmsprop": ("RMSprop", {}),
}

OTHERS = "another is a function that makes it of parameters, on the command line FILE.py:FUNCTION"


# Numbers.


def as_integer(value: Any) -> int | None:
    """The integer; None for another value, and for True and False."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def count(value: Any, least: int = 1) -> int:
    """A whole number of at least `least`."""
    number = as_integer(value)
    if number is None and isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+\s*", value):
        number = int(value)
    if number is None:
        raise ValueError(f"must be a whole number, got {value!r}")
    if number < least:
        raise ValueError(f"must be at least {least}, got {number}")
    if number >= 2**63:
        raise ValueError(f"must be below 2^63, got {number}")
    return number


def number(value: Any) -> int:
    """A whole number that may be 0."""
    return count(value, least=0)


def count_or_ten(value: Any) -> int:
    """A count; True is 10."""
    return 10 if value is True else count(value)


def counts(value: Any) -> list[int]:
    """Whole numbers: "1,2", [1, 2] or 1."""
    found = [count(part) for part in parts_of_list(value)]
    if not found:
        raise ValueError("must be at least one number, got an empty list")
    return found


def sizes(value: Any) -> list[int]:
    """Sizes: "8", "16,32", "256:16384:x2", [16, 32] or 16."""
    return parse_sizes(",".join(map(str, parts_of_list(value))))


def norm(value: Any) -> float:
    """A number that is not negative."""
    found = as_float(value)
    if not found >= 0:
        raise ValueError(f"must be a number that is not negative, got {value!r}")
    return found


def seconds(value: Any) -> float:
    """A number of seconds, 0 or more."""
    found = as_float(value)
    if not 0 <= found < math.inf:
        raise ValueError(f"must be a number of seconds, 0 or more, got {value!r}")
    return found


def as_float(value: Any) -> float:
    """The number; NaN for another value."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def size_in_bytes(value: Any) -> int:
    """A number of bytes: of an integer, or of a text such as "40GiB"."""
    if isinstance(value, str):
        return parse_bytes(value)
    if (size := as_integer(value)) is None or size < 1:
        raise ValueError(f"must be a positive number of bytes, got {value!r}; a text such as '40GiB' will do")
    return size


def growth(value: Any) -> Growth:
    """How much a figure may grow: "5%", "4KiB"."""
    if isinstance(value, Growth):
        return value
    try:
        return parse_growth(str(value))
    except ValueError as error:
        raise ValueError(str(error).replace("must look like ", "must look like 5%, ")) from None


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be True or False, got {value!r}")
    return value


# Texts.


def parts_of_list(value: Any) -> Iterable[Any]:
    """The members of a list, or of a text with commas; else the value itself."""
    if isinstance(value, str):
        return value.split(",")
    return value if isinstance(value, list | tuple | range) else [value]


def names(value: Any) -> list[str]:
    """Names: "a,b", ["a", "b,c"]; torch.float16 is "float16"."""
    texts = [value] if isinstance(value, str) or not isinstance(value, Iterable) else value
    found = [part.strip() for text in texts for part in str(text).removeprefix("torch.").split(",")]
    if not found:
        raise ValueError("must be at least one name, got an empty list; leave it out for the default")
    return found


def text(value: Any) -> str:
    """A text; of a torch.device its name."""
    return str(value)


def dtype_name(value: Any) -> str:
    """The long name of a floating-point dtype, from "bf16", "bfloat16" or torch.bfloat16."""
    given = str(value).removeprefix("torch.")
    found = SHORT_DTYPES.get(given.lower(), given.lower())
    if found not in DTYPES:
        known = (*SHORT_DTYPES, *DTYPES)
        raise ValueError(f"{given} is {unknown(given, known)}")
    return found


def dtype_names(value: Any) -> list[str]:
    """The long names of floating-point dtypes."""
    return [dtype_name(part) for part in names(value)]


def autocast_name(value: Any) -> str:
    """The long name of a dtype that autocast casts to."""
    given = str(value).removeprefix("torch.")
    found = SHORT_DTYPES.get(given.lower(), given.lower())
    if found not in ("bfloat16", "float16"):
        similar = did_you_mean(given, ("bf16", "fp16"))
        raise ValueError(f"must be bf16 or fp16, as a text or a torch.dtype, got {value!r}{similar}")
    return found


def autocast_dtype(value: Any) -> torch.dtype:
    """The dtype that autocast casts to, from "bf16", "bfloat16" or torch.bfloat16, or of fp16."""
    import torch

    dtype: torch.dtype = getattr(torch, autocast_name(value))
    return dtype


def optimizer(value: Any) -> str | Callable[..., Any]:
    """What makes an optimizer of parameters: a name, a class or a function."""
    value = spelled_as(value, OPTIMIZERS)
    if isinstance(value, str):
        if value not in OPTIMIZERS:
            raise ValueError(f"{value!r} is {unknown(value, OPTIMIZERS)}; {OTHERS}")
    elif not callable(value):
        rule = "must be a function that makes one of parameters, such as torch.optim.AdamW, or a name"
        raise ValueError(f"{rule}, got {value!r}")
    return cast(str | Callable[..., Any], value)


def optimizer_name(text: str) -> str:
    """The name of an optimizer, or the reference of a function that makes one."""
    return str(optimizer(text)) if ":" not in text else reference(text)


def function(value: Any) -> Callable[..., Any]:
    if not callable(value):
        raise ValueError(f"must be callable, got {value!r}")
    return cast(Callable[..., Any], value)


def reference(text: str) -> str:
    """The text, which must look like "package.module:function" or "FILE.py:function"."""
    place, colon, name = text.rpartition(":")
    if text.endswith(".py") and (functions := functions_in(text)):
        raise ValueError(
            f"must name a function, as in {text}:{functions[0]}, got {text!r}, which has {', '.join(functions)}"
        )
    if not (place and colon and all(word.isidentifier() for word in name.split("."))):
        raise ValueError(f"must look like package.module:function or FILE.py:function, got {text!r}")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"{text}: there is no file {place}")
    return text


def functions_in(path: str) -> list[str]:
    """The names of the functions of a file of Python; none if it cannot be read."""
    import ast

    try:
        parts = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [part.name for part in parts if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")]


def folder(value: Any) -> Path:
    if not str(value):
        raise ValueError("must name a folder, got ''")
    return Path(value)


def file(value: Any) -> Path:
    if not str(value) or Path(value).is_dir():
        raise ValueError(f"must name a file, got {str(value)!r}")
    return Path(value)


def existing_file(value: Any) -> Path:
    if not file(value).is_file():
        raise ValueError(f"{value}: there is no such file")
    return Path(value)


def config_file(value: Any) -> Path:
    try:
        return existing_file(value)
    except ValueError as error:
        raise ValueError(f"{error}; it is the config.json of a model's page at huggingface.co") from None


def gpu_index(value: Any) -> int:
    """The number of a GPU; True is the first one."""
    if value is True:
        return 0
    if not str(value).isdecimal():
        raise ValueError(f"must be the number of a GPU, got {value!r}")
    return int(value)


# Lists of them.


def each(convert: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """The converter of one value or a list of them."""
    return lambda value: [convert(part) for part in (value if isinstance(value, list | tuple) else [value])]


texts, folders, files = each(text), each(folder), each(file)
