"""Python functions of torch, as a predicting thread calls them. No attribute of a module of torch changes.

Most of them ask whether a function mode is active, and then call the mode in place of their own bodies. The mode calls
copies of them that do not ask, so that it sees what their bodies call. The few that decide by the device without a
function mode are in ANSWERED.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from memcheck.core.errors import line_words

# Modules whose functions ask, and the names by which they ask.
ASKING = {"torch", "torch._ops", "torch._tensor", "torch.autograd", "torch.functional", "torch.overrides"}
ASKING |= {"torch.nn.functional", "torch.nn.init", "torch.nn.modules.activation", "torch.nn.modules.transformer"}
QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

# Functions that say what this machine has.
OF_THIS_MACHINE = [
    f"torch.{kind}.{name}" for kind in ("accelerator", "cuda") for name in ("device_count", "is_available")
]
OF_THIS_MACHINE += ["torch.accelerator.current_accelerator", "torch.cuda.mem_get_info"]
OF_THIS_MACHINE += ["torch.cuda.get_device_name", "torch.cuda.get_device_properties"]

# Functions that a predicting thread gets other answers from, and why. While a thread predicts, they run code that asks
# which thread calls them. For other threads, it runs their own code.
ANSWERED = {
    # Choose a fused path unless a function mode is active, and are no calls under it.
    "torch.nn.MultiheadAttention.forward": "runs the path that it chooses without a function mode",
    "torch.nn.TransformerEncoder.forward": "runs the path that it chooses without a function mode",
    "torch.nn.TransformerEncoderLayer.forward": "runs the path that it chooses without a function mode",
    # Get the device from C++, which says meta.
    "torch.utils._foreach_utils._device_has_foreach_support": "says yes for meta tensors, as for those of the target",
    # Would compare meta, which autograd's hooks see, with the target's device, which the model sees.
    "torch.utils.checkpoint._default_meta_extractor": "leaves out the device of a tensor that is kept or recomputed",
    # Take no tensor, and call no function that a mode sees.
    "torch.get_rng_state": "counts the random state, which lies on the CPU and which no operator shows",
    "torch.amp.autocast_mode.autocast.__exit__": "drops the casts of parameters, as torch drops its own",
    # Begins code of torch.compile.
    "torch._dynamo.eval_frame._callback_from_stance": "refuses compiled code",
    "torch.cuda.get_device_capability": "is that of the target",
    "torch.cuda.is_bf16_supported": "is that of a target of CUDA",
    **dict.fromkeys(OF_THIS_MACHINE, "is that of this machine: in a model, a doubt"),
    "torch.cuda.amp.common.amp_definitely_not_available": "says no for a target of CUDA, as autocast asks",
}

EMPTY = object()  # What an empty cell of a closure holds.


class ElsewhereError(NotImplementedError):
    """A process of its own can predict this: code under torch.compile, or code that asks for a GPU."""


class CompiledCodeError(ElsewhereError):
    """torch.compile decides what is allocated."""


def no(*_: Any) -> bool:
    return False


def yes(*_: Any) -> bool:
    return True


def callback_unless_compiled(callback: Any) -> Any:
    """What torch._dynamo.eval_frame._callback_from_stance returns: None for functions that run as they are.

    NotImplementedError: the calling function of torch.compile would run compiled code.
    """
    found = original("torch._dynamo.eval_frame._callback_from_stance")(callback)
    compiled = sys._getframe(2).f_locals.get("fn")
    # torch's higher-order operators compile a wrapper of themselves, and raise their own error.
    is_operator = getattr(compiled, "__name__", "").endswith("op_wrapper")
    if found is None or (is_operator and compiled.__module__.startswith("torch.")):
        return found
    raise CompiledCodeError(compiled_words(compiled))


def compiled_words(function: Any, name: str = "") -> str:
    """Why a function, or the module whose method it is, is not predicted. name: of the function; default: its own."""
    function = inspect.unwrap(getattr(function, "_torchdynamo_orig_callable", function))
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        function, name = type(owner).forward, name or type(owner).__name__
    code = getattr(function, "__code__", None)
    place = "" if code is None else f", at {line_words(code.co_filename, code.co_firstlineno)}"
    name = name or getattr(function, "__qualname__", "a function")
    return f"torch.compile decides what {name} allocates{place}"


def asks(thing: Any) -> bool:
    """Whether it is a Python function of a module whose functions ask for a function mode."""
    return isinstance(thing, FunctionType) and (
        thing.__module__ in ASKING or thing.__globals__.get("__name__") in ASKING
    )


class Bodies:
    """Copies of functions that ask for a function mode, which get the answer that there is none.

    A function such as torch.nn.functional.softplus reads `has_torch_function_unary` among the globals of its module.
    Its copy has the same code and other globals, in which that name is a function that says no. In these globals, and
    in the variables of its closure, functions that ask are replaced by their copies, too; those of other modules come
    to the mode, which calls their copies.
    """

    def __init__(self) -> None:
        self._bodies: dict[Any, Any] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}

    def of(self, func: Any) -> Any:
        """The body of the function; None if it does not ask."""
        try:
            return self._bodies[func]
        except KeyError:
            pass
        if isinstance(func, HigherOrderOperator):
            self._bodies[func] = functools.partial(self.of(HigherOrderOperator.__call__), func)
        elif asks(func):
            self._copy(func)
        else:
            self._bodies[func] = None
        return self._bodies[func]

    def of_forwards(self) -> dict[str, Callable[..., Any]]:
        """The bodies of the forwards in ANSWERED, by name. They are made when they are called."""

        def forward(name: str, *args: Any, **kwargs: Any) -> Any:
            return self.of(original(name))(*args, **kwargs)

        return {name: functools.partial(forward, name) for name in ANSWERED if name.endswith(".forward")}

    def _copy(self, func: FunctionType) -> None:
        """Copies a function that asks, and those of its module and its closure that it calls."""
        namespace = self._namespace_of(func.__globals__)
        cells = tuple(CellType() if asks(contents_of(cell)) else cell for cell in func.__closure__ or ())
        body = FunctionType(func.__code__, namespace, func.__name__, func.__defaults__, cells)
        body.__kwdefaults__ = func.__kwdefaults__
        self._bodies[func] = self._bodies[body] = body  # Before those that it calls, which may call it.
        for cell, before in zip(cells, func.__closure__ or (), strict=True):
            if cell is not before:
                cell.cell_contents = self.of(before.cell_contents)
        for name in names_in(func.__code__):
            if asks(called := namespace.get(name)):
                namespace[name] = self.of(called)

    def _namespace_of(self, names: dict[str, Any]) -> dict[str, Any]:
        """The global names of a module, with other answers."""
        if id(names) not in self._namespaces:
            overrides = with_names(torch.overrides, dict.fromkeys(QUESTIONS, no))
            news: dict[str, Any] = {**dict.fromkeys(QUESTIONS, no), "overrides": overrides}
            if not names.keys() & news.keys():
                news["torch"] = with_names(torch, {"overrides": overrides})
            self._namespaces[id(names)] = {**names, **{name: new for name, new in news.items() if name in names}}
        return self._namespaces[id(names)]


def with_names(module: ModuleType, news: Mapping[str, Any]) -> ModuleType:
    """A copy of the module in which these names mean something else."""
    copy = ModuleType(module.__name__)
    copy.__dict__.update({**module.__dict__, **news})
    return copy


def names_in(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in the code, and in the functions inside."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from names_in(part)


def contents_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # It is empty.
        return EMPTY


# While a thread predicts, a function of ANSWERED runs `return here(name)(its arguments)`, in every thread:
#   begin_to_ask: the first thread that predicts gives it that code; end_to_ask: the last one gives it its own again.
#   here: what the calling thread runs: its answer in HERE, else the ORIGINAL with the function's own code.
class Answers(threading.local):
    """This thread's replacements of the functions of ANSWERED, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Callable[..., Any]] = {}


HERE = Answers()
ORIGINALS: dict[str, FunctionType] = {}
USERS: Counter[str] = Counter()  # How many threads have an answer of their own.
LOCK = threading.RLock()


@contextmanager
def answered(answers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, this thread gets these answers from functions of ANSWERED, given by name.

    In a process that pretends to have the target's GPU, some answer for it already.
    """
    answers = {name: answer for name, answer in answers.items() if not hasattr(function_named(name), "of_the_target")}
    before = HERE.by_name
    with LOCK:
        for name in answers:
            begin_to_ask(name)
    HERE.by_name = {**before, **answers}
    try:
        yield
    finally:
        HERE.by_name = before
        with LOCK:
            for name in answers:
                end_to_ask(name)


def begin_to_ask(name: str) -> None:
    USERS[name] += 1
    if USERS[name] == 1:
        func = original(name)
        function_named(name).__code__ = asking_code(name, func)


def end_to_ask(name: str) -> None:
    USERS[name] -= 1
    if USERS[name] == 0:
        function_named(name).__code__ = ORIGINALS[name].__code__


@functools.cache
def function_named(name: str) -> Any:
    assert name in ANSWERED
    return pkgutil.resolve_name(name)


def original(name: str) -> Any:
    """A function of ANSWERED as it is without a prediction."""
    with LOCK:
        if name not in ORIGINALS:
            func = function_named(name)
            ORIGINALS[name] = FunctionType(func.__code__, func.__globals__, func.__name__, func.__defaults__)
            ORIGINALS[name].__kwdefaults__ = func.__kwdefaults__
        return ORIGINALS[name]


@functools.cache
def asking_code(name: str, func: Any) -> CodeType:
    """Code that calls what the function is for the calling thread. Its parameters and its place are the function's."""
    parameters = inspect.signature(func).parameters.values()
    bare = [each.replace(default=each.empty, annotation=each.empty) for each in parameters]
    given = ", ".join(f"{each.name}={each.name}" if each.kind == each.KEYWORD_ONLY else str(each) for each in bare)
    head, body = f"def {func.__name__}{inspect.Signature(bare)}:", f"return here({name!r})({given})"
    names: dict[str, Any] = {}
    exec(f"{head}\n from {__name__} import here\n {body}", names)
    code: CodeType = names[func.__name__].__code__
    return code.replace(co_filename=func.__code__.co_filename, co_firstlineno=func.__code__.co_firstlineno)


def here(name: str) -> Callable[..., Any]:
    """The function that this thread runs under the name."""
    return HERE.by_name.get(name) or ORIGINALS[name]
