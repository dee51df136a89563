"""The projections: the contract, claim by claim."""

from __future__ import annotations

import pytest
import torch
from ops.checks import (
    DTYPES,
    HALF_DTYPES,
    LAYOUTS,
    Bound,
    Contract,
    Function,
    NoGradient,
    assert_contract,
    assert_strides,
    gradients_moved_by_autograd,
    laid_out,
    run,
    run_subset,
    same_bits,
    saved_for_backward,
    subsets,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from memcheck import linear_l, linear_r, measure_memory
from memcheck.reference import projection as reference

FUNCTIONS = [linear_r, linear_l]
BACKWARD = {
    linear_r: torch.ops.memcheck.linear_r_backward.default,
    linear_l: torch.ops.memcheck.linear_l_backward.default,
}
MIB = 2**20

# B, S, E, R
SHAPES = [
    (1, 1, 1, 1),
    (2, 63, 127, 129),
    (3, 129, 1, 63),
    (1, 300, 63, 1),
    (17, 1, 129, 63),
    (2, 513, 300, 127),
    (3, 257, 65, 300),
]
EMPTY_SHAPES = [(0, 5, 7, 3), (2, 0, 7, 3), (2, 5, 0, 3), (2, 5, 7, 0), (0, 0, 0, 0)]


def contract(function: Function, summed_in_pieces: bool = False) -> Contract:
    """summed_in_pieces: grad_w is a sum of products, each of which is rounded to the dtype."""
    plain = getattr(reference, function.__name__)

    def bounds(grad_y: Tensor, x: Tensor, w: Tensor) -> list[Bound]:
        B, S, E = x.shape
        magnitudes = run(plain, [x.abs(), w.abs()], grad_y.abs())
        terms = (E, w.shape[1], B * S)
        return [
            Bound(values, n, stored=summed_in_pieces and i == 2)
            for i, (values, n) in enumerate(zip(magnitudes, terms, strict=True))
        ]

    return Contract(function, plain, bounds)


def make_inputs(
    function: Function, B: int, S: int, E: int, R: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """[x (B,S,E), w (E,R)] and grad_y, (B,S,R) or (B,R,S)"""
    generator = torch.Generator().manual_seed(1)
    of_y = (B, S, R) if function is linear_r else (B, R, S)
    x, w, grad_y = (torch.randn(shape, generator=generator).to(dtype) for shape in ((B, S, E), (E, R), of_y))
    return [x, w], grad_y


# ---- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY_SHAPES], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_and_gradients(function: Function, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    in_pieces = function is linear_l and shape[0] > 1
    assert_contract(contract(function, in_pieces), *make_inputs(function, *shape, dtype), against_plain=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_any_strides(function: Function, layout: str, dtype: torch.dtype) -> None:
    (x, w), grad_y = make_inputs(function, 3, 40, 35, 50, dtype)
    for *inputs, grad in laid_out([x, w, grad_y], layout):
        before = [tensor.clone() for tensor in (*inputs, grad)]
        assert_strides(assert_contract(contract(function, summed_in_pieces=True), inputs, grad), inputs)
        assert same_bits(before, [*inputs, grad])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_many_pieces_do_not_lose_grad_w(function: Function, dtype: torch.dtype) -> None:
    """16-bit sums of 400 equal products would stop growing at 256 of the first: the sum is formed in float32."""
    x = torch.ones(400, 2, 3, dtype=dtype)
    w = torch.ones(3, 5, dtype=dtype)
    grad_y = torch.ones((), dtype=dtype).expand(400, 2, 5) if function is linear_r else torch.ones(400, 5, 2).to(dtype)
    _, _, grad_w = run(function, [x, w], grad_y)
    assert torch.equal(grad_w, torch.full_like(grad_w, 800))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_bits_again(function: Function) -> None:
    inputs, grad_y = make_inputs(function, 3, 129, 65, 127)
    first = run(function, inputs, grad_y)
    for _ in range(3):
        assert same_bits(run(function, inputs, grad_y), first)


# ---- autograd


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_that_are_asked_for(function: Function, layout: str) -> None:
    inputs, grad_y = make_inputs(function, 3, 40, 35, 50)
    inputs = [LAYOUTS[layout](x) for x in inputs]
    _, *all_gradients = run(function, inputs, grad_y)
    for mask in subsets(2):
        expected = [x if wanted else None for x, wanted in zip(all_gradients, mask, strict=True)]
        gradients = run_subset(function, inputs, mask, grad_y)
        assert same_bits(gradients, expected)
        for one, other in zip(gradients, expected, strict=True):
            assert one is None or one.stride() == other.stride()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_what_backward_reads_is_kept(function: Function) -> None:
    """A frozen weight keeps no x, a frozen x no weight."""
    inputs, _ = make_inputs(function, 3, 40, 35, 50)
    for mask, kept in (((True, True), inputs), ((True, False), inputs[1:]), ((False, True), inputs[:1])):
        leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
        saved = saved_for_backward(lambda leaves=leaves: function(*leaves))
        assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in kept]
    assert saved_for_backward(lambda: function(*inputs)) == []
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.no_grad():
        assert saved_for_backward(lambda: function(*leaves)) == []
        assert not function(*leaves).requires_grad


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_undefined_gradient_stays_undefined(function: Function) -> None:
    inputs, _ = make_inputs(function, 2, 5, 7, 3)
    leaves = [x.requires_grad_() for x in inputs]
    NoGradient.apply(function(*leaves)).sum().backward()
    assert [leaf.grad for leaf in leaves] == [None] * 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_twice_adds_up(function: Function) -> None:
    inputs, grad_y = make_inputs(function, 2, 5, 7, 3)
    leaves = [x.requires_grad_() for x in inputs]
    y = function(*leaves)
    y.backward(grad_y, retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    y.backward(grad_y)
    assert same_bits([leaf.grad for leaf in leaves], [2 * x for x in once])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_tensor_in_both_roles(function: Function) -> None:
    x = torch.randn(1, 6, 6, dtype=torch.float64)
    grad_y = torch.randn_like(x)
    _, grad_x, grad_w = run(function, [x, x[0]], grad_y)
    (both,) = run(lambda x: function(x, x[0]), [x], grad_y)[1:]
    torch.testing.assert_close(both, grad_x + grad_w)


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_saved_input_changed_in_place_is_an_error(function: Function, changed: int) -> None:
    inputs, _ = make_inputs(function, 2, 5, 7, 3)
    held = [x.requires_grad_() * 1 for x in inputs]
    y = function(*held)
    with torch.no_grad():
        held[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dual", [0, 1])
def test_forward_mode_raises(function: Function, dual: int) -> None:
    inputs = list(make_inputs(function, 2, 5, 7, 3)[0])
    with forward_ad.dual_level():
        inputs[dual] = forward_ad.make_dual(inputs[dual], inputs[dual])
        with pytest.raises(NotImplementedError, match=f"{function.__name__}: forward-mode differentiation"):
            function(*inputs)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_double_backward_raises(function: Function) -> None:
    inputs, grad_y = make_inputs(function, 2, 5, 7, 3)
    leaves = [*(x.requires_grad_() for x in inputs), grad_y.requires_grad_()]
    gradients = torch.autograd.grad(function(*inputs), inputs, grad_y, create_graph=True)
    for gradient in gradients:
        with pytest.raises(NotImplementedError, match=f"{function.__name__}: double backward is not implemented"):
            torch.autograd.grad(gradient.sum(), leaves, retain_graph=True)


@pytest.mark.parametrize("mask", subsets(2))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_double_backward_through_the_gradient_of_y_raises(function: Function, mask: tuple[bool, bool]) -> None:
    """Also where an input is frozen, so that backward was not given all of them."""
    inputs, grad_y = make_inputs(function, 2, 5, 7, 3)
    for x, wanted in zip(inputs, mask, strict=True):
        x.requires_grad_(wanted)
    leaves = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(function(*inputs), leaves, grad_y.requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{function.__name__}: double backward is not implemented"):
        torch.autograd.grad(sum(gradient.sum() for gradient in gradients), grad_y)


# ---- torch's own checks


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("layout", ["dense", "transposed", "every second column"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_opcheck(function: Function, layout: str, requires_grad: bool) -> None:
    (x, w), grad_y = make_inputs(function, 2, 5, 7, 3)
    x, w = (LAYOUTS[layout](tensor).requires_grad_(requires_grad) for tensor in (x, w))
    torch.library.opcheck(getattr(torch.ops.memcheck, function.__name__).default, (x, w))
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # Tracing differentiates the backward, which raises by contract.
    if not requires_grad:
        utilities.append("test_aot_dispatch_dynamic")
    for given, mask in (((x, w), [True, True]), ((x, None), [False, True]), ((None, w), [True, False])):
        arguments = (grad_y, *given)
        torch.library.opcheck(BACKWARD[function], arguments, {"output_mask": mask}, test_utils=utilities)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compile(function: Function, dynamic: bool) -> None:
    """Traced without a break; with dynamic=True one graph serves every shape."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    shapes, frames = [(2, 5, 7, 3), (3, 30, 8, 4), (4, 9, 6, 5)], []
    for shape in shapes:
        inputs, grad_y = make_inputs(function, *shape)
        assert same_bits(run(compiled, inputs, grad_y), run(function, inputs, grad_y))
        frames.append(backend.frame_count)
    assert len(set(frames)) == (1 if dynamic else len(shapes))


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compile_with_inductor(function: Function) -> None:
    torch._dynamo.reset()

    def curved(x: Tensor, w: Tensor) -> Tensor:
        return function(x.sin(), w * 2).cos()

    inputs, grad_y = make_inputs(function, 2, 30, 7, 5)
    compiled = torch.compile(curved, fullgraph=True, dynamic=True)
    for ours, theirs in zip(run(compiled, inputs, grad_y), run(curved, inputs, grad_y), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_autocast(function: Function) -> None:
    inputs, grad_y = make_inputs(function, 2, 70, 30, 40)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        y = function(*leaves)
    assert y.dtype == torch.bfloat16
    y.backward(grad_y.bfloat16())
    in_bfloat16 = run(function, [x.detach().bfloat16() for x in leaves], grad_y.bfloat16())
    results = [y.detach(), *(leaf.grad for leaf in leaves)]
    assert same_bits(results, [in_bfloat16[0], *(x.float() for x in in_bfloat16[1:])])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_meta(function: Function, layout: str, dtype: torch.dtype) -> None:
    inputs, grad_y = make_inputs(function, 3, 40, 35, 50, dtype)
    inputs = [LAYOUTS[layout](x) for x in inputs]
    meta = run(function, [x.to("meta") for x in inputs], grad_y.to("meta"))
    for x, shadow in zip(run(function, inputs, grad_y), meta, strict=True):
        assert (shadow.device.type, shadow.dtype) == ("meta", x.dtype)
        assert (shadow.shape, shadow.stride()) == (x.shape, x.stride())


# ---- memory


def piece_rows(B: int, S: int, R: int, item: int) -> int:
    """A gradient that GEMM cannot read is copied through rows of a sixteenth of it, or of 1 MiB."""
    return min(max(max(B * S * R * item // 16, MIB) // (R * item), 1), S)


def products_of(function: Function, B: int, S: int, rows: int | None) -> int:
    """How many products grad_w is the sum of: one if all rows are those of a matrix, else one a piece or an entry."""
    if rows is not None:
        return B * -(-S // rows)
    return 1 if function is linear_r else B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("shape", [(1, 4096, 256, 512), (3, 2000, 128, 700), (2, 50, 64, 30)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_to_the_byte(
    function: Function, shape: tuple[int, int, int, int], dense: bool, dtype: torch.dtype
) -> None:
    """An expanded gradient is copied in pieces; sums of products in 16 bits take grad_w in float32, and one product."""
    B, S, E, R = shape
    (x, w), _ = make_inputs(function, *shape, dtype)
    record = measure_memory(function, x.requires_grad_(), w.requires_grad_(), dense_grad=dense)
    held = record.input_bytes + record.output_bytes
    assert record.saved_bytes == 0
    assert record.gradient_bytes == x.nbytes + w.nbytes
    grad_y = record.output_bytes if dense else x.itemsize
    rows = None if dense else piece_rows(B, S, R, x.itemsize)
    piece = (rows or 0) * R * x.itemsize
    sums = E * R * (4 + 2) if dtype == torch.bfloat16 and products_of(function, B, S, rows) > 1 else 0
    # oneDNN takes scratch from torch's allocator for its 16-bit products, and we do not know how much.
    library = 0 if dtype == torch.float32 else MIB
    assert 0 <= record.forward_peak_bytes - held <= library
    assert 0 <= record.backward_peak_bytes - (held + grad_y + record.gradient_bytes + piece + sums) <= library


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_taken_over_as_they_are(function: Function, layout: str) -> None:
    inputs, grad_y = make_inputs(function, 3, 40, 35, 50)
    assert gradients_moved_by_autograd(function, [LAYOUTS[layout](x) for x in inputs], grad_y) == []


# ---- what is refused

RAISES = {
    "x of rank 2": ({"x": torch.ones(5, 7)}, ValueError, r"x must be \(B,S,E\), of 3 dimensions, got \[5, 7\]"),
    "w of rank 1": ({"w": torch.ones(7)}, ValueError, r"w must be \(E,R\), of 2 dimensions, got \[7\]"),
    "another E": ({"w": torch.ones(6, 3)}, ValueError, r"w must be \(E,R\) = \[7, 3\] to match x, got \[6, 3\]"),
    "float64 w": ({"w": torch.ones(7, 3).double()}, TypeError, "w must be float32 to match x, got float64"),
    "integers": ({"x": torch.ones(2, 5, 7).int()}, TypeError, "x must be float64, .* or bfloat16, got int32"),
    "booleans": ({"x": torch.ones(2, 5, 7).bool()}, TypeError, "x must be float64, .* or bfloat16, got bool"),
    "complex": ({"x": torch.ones(2, 5, 7).cfloat()}, TypeError, "x must be float64, .* or bfloat16, got complex64"),
    "w elsewhere": ({"w": torch.ones(7, 3, device="meta")}, ValueError, "w must be on cpu as x is, got meta"),
    "x elsewhere": ({"x": torch.ones(2, 5, 7, device="meta")}, ValueError, "w must be on meta as x is, got cpu"),
    "no x": ({"x": None}, TypeError, "x must be a tensor, got None"),
    "no w": ({"w": None}, TypeError, "w must be a tensor, got None"),
    # These two never reach the operator: the words are the dispatcher's.
    "a list": ({"x": [1.0]}, RuntimeError, "Expected a value of type 'Tensor' for argument 'x'"),
    "sparse": ({"w": torch.ones(7, 3).to_sparse()}, NotImplementedError, "'SparseCPU' backend"),
}


@pytest.mark.parametrize("wrong", RAISES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_input(function: Function, wrong: str) -> None:
    changed, kind, message = RAISES[wrong]
    (x, w), _ = make_inputs(function, 2, 5, 7, 3)
    arguments = {"x": x, "w": w, **changed}
    with pytest.raises(kind, match=f"{function.__name__}.*{message}"):
        function(arguments["x"], arguments["w"])


BACKWARD_RAISES = {
    "rank of grad_y": ({"grad_y": torch.ones(5, 3)}, ValueError, "grad_y must be .*, of 3 dimensions, got"),
    "R of grad_y": ({"grad_y": torch.ones(2, 4, 4)}, ValueError, "x must be .* to match grad_y, got"),
    "B of grad_y": ({"grad_y": torch.ones(1, 5, 5)}, ValueError, "x must be .* to match grad_y, got"),
    "dtype of grad_y": (
        {"grad_y": torch.ones(2, 5, 5).double()},
        TypeError,
        "x must be float64 to match grad_y, got float32",
    ),
    "grad_y elsewhere": (
        {"grad_y": torch.ones(2, 5, 5, device="meta")},
        ValueError,
        "x must be on meta as grad_y is, got cpu",
    ),
    "integer grad_y": ({"grad_y": torch.ones(2, 5, 5).int()}, TypeError, "grad_y must be float64, .* got int32"),
    "no grad_y": ({"grad_y": None}, TypeError, "grad_y must be a tensor, got None"),
    "no x": ({"x": None}, ValueError, "x is needed for the gradient of w"),
    "no w": ({"w": None}, ValueError, "w is needed for the gradient of x"),
    "another E": (
        {"w": torch.ones(6, 5)},
        ValueError,
        r"w must be \(E,R\) = \[7, 5\] to match x and grad_y, got \[6, 5\]",
    ),
}


@pytest.mark.parametrize("wrong", BACKWARD_RAISES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_backward(function: Function, wrong: str) -> None:
    changed, kind, message = BACKWARD_RAISES[wrong]
    arguments = {"grad_y": torch.ones(2, 5, 5), "x": torch.ones(2, 5, 7), "w": torch.ones(7, 5), **changed}
    with pytest.raises(kind, match=f"{function.__name__}_backward: {message}"):
        BACKWARD[function](*arguments.values(), output_mask=[True, True])
