"""What torch.compile, Triton and CUDA graphs do on a simulated GPU, in a process of its own.

python compiled_features.py GROUP    runs the group's functions, and prints the names of those that ended
python compiled_features.py cs336    reads rows of the published table, and prints the five figures of each
"""

import functools
import json
import sys
from importlib.machinery import PathFinder

import memcheck

if sys.argv[1] == "without_triton":
    find = PathFinder.find_spec
    PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] == "triton" else find(name, *rest)
memcheck.simulate("A100-80GB")
BEFORE = set(sys.modules)

import torch  # noqa: E402

AFTER = set(sys.modules)

from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from memcheck.simulated.doubts import doubts  # noqa: E402

GROUPS = {}
MIB = 2**20


def group(name):
    def add(function):
        GROUPS.setdefault(name, []).append(function)
        return function

    return add


def mlp():
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()


def batch(rows=64, **how):
    return torch.randn(rows, 256, device="cuda", **how)


def step(function, *inputs):
    out = function(*inputs)
    out.sum().backward()
    return out


def graphs():
    return counters["stats"]["unique_graphs"]


def said(words):
    return any(words in doubt.what for doubt in doubts())


def raised(error, function):
    try:
        function()
    except error as found:
        return str(found)
    raise AssertionError(f"no {error.__name__}")


@group("guards")
def torch_alone_imports_no_compiler():
    assert "torch" not in BEFORE
    assert not [name for name in AFTER if name.startswith(("triton", "torch._dynamo", "torch._inductor"))]


@group("guards")
def compiled_steps_allocate_the_same():
    m, x = torch.compile(mlp()), batch(requires_grad=True)
    kept = []
    for _ in range(3):
        x.grad = None
        m.zero_grad()
        step(m, x)
        kept.append(torch.cuda.memory_allocated())
    assert kept[1] == kept[2]
    assert graphs() == 1


@group("guards")
def a_second_shape_compiles_a_dynamic_graph():
    m = torch.compile(mlp())
    for rows in (64, 96, 128):
        step(m, batch(rows))
    assert graphs() == 2


@group("guards")
def dynamic_shapes_compile_once():
    m = torch.compile(mlp(), dynamic=True)
    for rows in (64, 96, 128):
        step(m, batch(rows))
    assert graphs() == 1


@group("guards")
def a_marked_dimension_compiles_once():
    m = torch.compile(mlp())
    for rows in (64, 96):
        x = batch(rows)
        torch._dynamo.mark_dynamic(x, 0)
        step(m, x)
    assert graphs() == 1


@group("guards")
def a_number_on_the_gpu_breaks_the_graph():
    weights = mlp()

    @torch.compile
    def f(x):
        x = weights(x)
        if x.sum() > 0:
            x = x * 2
        torch._dynamo.graph_break()
        return weights(x)

    step(f, batch())
    assert graphs() >= 2
    assert said("reads") or said("comparison") or doubts()


@group("training")
def autocast():
    m = torch.compile(mlp())
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            y = m(batch())
        assert y.dtype == torch.bfloat16
        y.sum().backward()


@group("training")
def checkpointed_layers():
    m = nn.Sequential(mlp(), nn.Dropout(0.1))
    f = torch.compile(lambda x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False))
    step(f, batch(requires_grad=True))


@group("training")
def attention():
    f = torch.compile(lambda q: scaled_dot_product_attention(q, q, q, is_causal=True))
    step(f, torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True))


@group("training")
def convolution():
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
    m = torch.compile(nn.Sequential(*layers).cuda())
    for _ in range(2):
        step(m, torch.randn(8, 3, 64, 64, device="cuda"))


@group("training")
def compiled_optimizers():
    for how in ({}, {"capturable": True, "lr": torch.tensor(1e-3, device="cuda")}):
        torch._dynamo.reset()
        m = mlp()
        optimizer = torch.optim.AdamW(m.parameters(), **how)
        compiled = torch.compile(optimizer.step)
        sizes = []
        for _ in range(3):
            step(m, batch())
            compiled()
            optimizer.zero_grad()
            sizes.append(torch.cuda.memory_allocated())
        assert sizes[1] == sizes[2]


@group("training")
def layers_compiled_alone():
    m = nn.Sequential(mlp(), mlp(), mlp())
    for layer in m:
        layer.compile()
    step(m, batch())
    assert graphs() <= 1


@group("training")
def a_view_that_requires_grad():
    f = torch.compile(lambda x: (x * 2).sin())
    x = batch(8, requires_grad=True)
    for _ in range(2):
        f(x[2:6].view(-1)).sum().backward()


def kernels():
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)

    globals()["add_kernel"] = add  # Where Dynamo finds it.
    return triton, add


@group("triton")
def a_kernel_writes_what_is_unknown_and_leaves_what_it_reads():
    triton, add = kernels()
    x, y = torch.full((1000,), 3, device="cuda"), torch.zeros(1000, dtype=torch.int64, device="cuda")
    before = torch.cuda.memory_allocated()
    add[(triton.cdiv(1000, 128),)](x, x, y, 1000, BLOCK=128)
    add[lambda given: (triton.cdiv(1000, given["BLOCK"]),)](x, x, y, 1000, BLOCK=128)
    assert torch.cuda.memory_allocated() == before
    assert not doubts()
    assert x[1].item() == 3
    assert not doubts()
    y[1].item()
    assert said("reads")


@group("triton")
def a_kernel_in_compiled_code():
    kernels()

    @torch.compile
    def f(x):
        y = torch.empty_like(x)
        add_kernel[(8,)](x, x, y, 1000, BLOCK=128)  # noqa: F821
        return y * 2

    assert f(torch.randn(1000, device="cuda")).shape == (1000,)


@group("triton")
def an_autotuned_kernel_takes_the_first_configuration_and_the_cache_that_it_clears():
    import triton
    import triton.language as tl

    @triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
    @triton.jit
    def copy(x, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)

    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy[lambda given: (triton.cdiv(1000, given["BLOCK"]),)](x, y, 1000)
    assert torch.cuda.max_memory_allocated() - before == 256 * MIB
    assert copy.best_config.kwargs == {"BLOCK": 128}


@group("triton")
def a_kernel_with_descriptors():
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def copy(a, b, N: tl.constexpr):
        b.store([0, 0], a.load([0, 0]))

    a, b = torch.full((16, 16), 3, device="cuda"), torch.zeros(16, 16, device="cuda")
    told = len(doubts())
    copy[(1,)](*(TensorDescriptor.from_tensor(each, [16, 16]) for each in (a, b)), N=16)
    assert a[0, 0].item() == 3
    assert len(doubts()) == told
    b[0, 0].item()
    assert len(doubts()) == told + 1


@group("triton")
def a_kernel_compiled_before_its_launch():
    _, add = kernels()
    x = torch.randn(1000, device="cuda")
    kernel = add.warmup(x, x, x, 1000, BLOCK=128, grid=(1,))
    kernel._init_handles()
    assert kernel.n_regs > 0
    assert kernel.metadata.shared > 0
    kernel[(8, 1, 1)](x, x, x, 1000, 128)


@group("without_triton")
def torch_says_that_triton_is_missing():
    m = mlp()
    words = raised(RuntimeError, lambda: torch.compile(m)(batch()))
    assert "Cannot find a working triton installation" in words
    step(torch.compile(m, backend="aot_eager"), batch())


@group("attention")
def flex_attention_with_a_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cuda")
    step(functools.partial(torch.compile(flex_attention), block_mask=mask), q, q, q)


@group("attention")
def flex_attention_with_a_score():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step(functools.partial(torch.compile(flex_attention), score_mod=lambda s, b, h, i, j: s + (i - j)), q, q, q)


@group("modes")
def compiled_autograd():
    with torch._dynamo.config.patch(compiled_autograd=True):
        m = torch.compile(mlp())
        f = torch.compile(lambda x: m(x).sum())
        for _ in range(2):
            f(batch(requires_grad=True)).backward()


@group("modes")
def max_autotune_takes_the_first_kernel_with_a_doubt():
    m = torch.compile(mlp(), mode="max-autotune-no-cudagraphs")
    for _ in range(2):
        step(m, batch(512))
    assert said("max-autotune takes the kernels of cuBLAS")


@group("modes")
def coordinate_descent():
    step(torch.compile(mlp(), options={"coordinate_descent_tuning": True}), batch())


@group("modes")
def other_backends():
    for backend in ("aot_eager", "eager", "cudagraphs"):
        torch._dynamo.reset()
        step(torch.compile(mlp(), backend=backend), batch())


@group("modes")
def a_product_with_an_odd_size_is_padded_with_a_doubt():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    b = torch.randn(4096, 4097, device="cuda", dtype=torch.float16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.compile(lambda a, b: a @ b)(a, b)
    assert said("pads the product 4096 x 4096 x 4097")
    # The padded operand and the result, beside cuBLAS' workspace.
    assert torch.cuda.max_memory_allocated() - before >= 2 * 4096 * 4104 * 2


@group("modes")
def max_autotune_with_graphs():
    m = torch.compile(mlp(), mode="max-autotune")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        step(m, batch())
        m.zero_grad()


@group("exported")
def export():
    exported = torch.export.export(mlp(), (batch(),), dynamic_shapes={"input": {0: torch.export.Dim("n", min=2)}})
    assert exported.module()(batch(96)).shape == (96, 256)


@group("exported")
def custom_operators():
    @torch.library.custom_op("compiled_features::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, gradient: gradient * 2)
    step(torch.compile(lambda x: twice(x).sin()), batch(requires_grad=True))


@group("exported")
def vmap_of_grad():
    f = torch.compile(torch.func.vmap(torch.func.grad(lambda x: (x.sin() ** 2).sum())))
    assert f(batch()).shape == (64, 256)


@group("exported")
def nested_tensors():
    parts = [torch.randn(i, 64) for i in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda")
    assert torch.compile(lambda n: n.sin() * 2)(nested).shape[2] == 64


@group("exported")
def sizes_that_depend_on_data():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.compile(lambda x: x[x > 0] * 2, dynamic=True)(batch()).dim() == 1


def captured(work):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


@group("graphs")
def a_capture_keeps_its_memory_and_a_replay_takes_none():
    m, x = mlp(), batch(4096)
    assert not torch.cuda.is_current_stream_capturing()
    before = torch.cuda.memory_allocated()
    graph, out = captured(lambda: (torch.cuda.is_current_stream_capturing(), m(x).detach())[1])
    # The result stays; cuBLAS' workspace of the capture too, in the graph's pool.
    assert torch.cuda.memory_allocated() - before >= out.untyped_storage().nbytes()
    reserved, requests = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        graph.replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests
    segments = {each["segment_pool_id"] for each in torch.cuda.memory_snapshot()}
    assert graph.pool() in segments
    del out
    torch.cuda.empty_cache()
    assert graph.pool() in {each["segment_pool_id"] for each in torch.cuda.memory_snapshot()}
    graph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved


@group("graphs")
def graphs_share_a_pool():
    m, x = mlp(), batch(4096)
    first, out = captured(lambda: m(x).detach())
    del out
    reserved, second = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=first.pool()):
        m(x)
    assert (second.pool(), torch.cuda.memory_reserved()) == (first.pool(), reserved)
    assert torch.cuda.graph_pool_handle() != torch.cuda.graph_pool_handle()


@group("graphs")
def what_torch_refuses_is_refused_in_its_words():
    graph = torch.cuda.CUDAGraph()
    assert "must be captured on a non-default stream" in raised(RuntimeError, graph.capture_begin)
    assert "without a preceding successful capture" in raised(RuntimeError, graph.replay)
    assert "capture_end() called before capture_begin()" in raised(RuntimeError, graph.capture_end)


@group("graphs")
def make_graphed_callables():
    graphed = torch.cuda.make_graphed_callables(mlp(), (batch(),))
    for _ in range(2):
        step(graphed, batch())
        graphed.zero_grad()


@group("graphs")
def a_pool_takes_what_its_thread_allocates():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
        assert pool.use_count() == 2
    assert pool.use_count() == 1
    assert [each["total_size"] for each in pool.snapshot()] == [50 * MIB]
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before == 50 * MIB
    del pool
    assert torch.cuda.memory_reserved() == before


@group("graphs")
def a_pool_serves_others_when_memory_is_short():
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(60 * 2**30, dtype=torch.uint8, device="cuda")
    del x
    y = torch.empty(60 * 2**30, dtype=torch.uint8, device="cuda")
    assert [each["active_size"] for each in pool.snapshot()] == [y.nbytes]
    del y


@group("graphs")
def memory_is_given_by_address():
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(MIB)
    assert torch.cuda.memory_allocated() - before == MIB
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == before
    assert "invalid device pointer" in raised(RuntimeError, lambda: torch.cuda.caching_allocator_delete(address))


@group("trees")
def compiled_graphs_are_replayed_without_memory():
    m, x = torch.compile(mlp(), mode="reduce-overhead"), batch(4096)
    figures = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        torch.cuda.reset_peak_memory_stats()
        step(m, x)
        m.zero_grad()
        figures.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()))
    # Neither the first step, which runs without graphs, nor the second, which captures.
    assert figures[2] == figures[3] == figures[4]
    assert figures[2][1] < figures[1][1]
    assert figures[2][2] == figures[1][2]
    assert counters["inductor"]["cudagraph_skips"] == 0


@group("trees")
def dropout_in_a_graph():
    m = torch.compile(nn.Sequential(mlp(), nn.Dropout(0.1)), mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        step(m, batch())
        m.zero_grad()
    assert counters["inductor"]["cudagraph_skips"] == 0


@group("trees")
def an_output_of_the_step_before_is_refused():
    f = torch.compile(lambda x: x * 2 + 1, mode="reduce-overhead")
    x = batch()
    outs = []
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        outs.append(f(x))
    assert "has been overwritten by a subsequent run" in raised(RuntimeError, lambda: outs[1] + 1)
    outs[2][0, 0].item()
    assert said("reads")


@group("trees")
def a_second_graph_continues_the_first():
    """Live outputs of a replayed graph own their memory while another is captured behind it."""
    f = torch.compile(lambda x: (x * 2 + 1, x - 1), mode="reduce-overhead")
    g = torch.compile(lambda y: y.sin(), mode="reduce-overhead")
    x = batch()
    with torch._inductor.config.patch({"triton.slow_path_cudagraph_asserts": True}):
        for takes_second in (False, False, False, True, True, True):
            torch.compiler.cudagraph_mark_step_begin()
            y, z = f(x)
            z = g(y) if takes_second else z
            del y, z


def figures_of_attention(length, dim, is_compiled):
    """Bytes after the inputs, before backward, what is kept, and both peaks, as the published script prints them."""
    from memcheck.ops.reference.cs336_attention import cs336_attention

    torch._dynamo.reset()
    f = torch.compile(cs336_attention, dynamic=False) if is_compiled else cs336_attention
    inputs = [torch.randn(8, length, dim, device="cuda", requires_grad=True) for _ in range(3)]
    gradient = torch.randn(8, length, dim, device="cuda")
    for _ in range(3):
        loss = f(*inputs).sum()
        loss.backward()
        for each in inputs:
            each.grad = None
    after_inputs = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = f(*inputs).sum()
    forward, before_backward = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    out = f(*inputs)
    again = out.sum()
    torch.cuda.reset_peak_memory_stats()
    again.backward()
    backward = torch.cuda.max_memory_allocated()
    del loss, gradient, out
    return after_inputs, before_backward, before_backward - after_inputs, forward, backward


def main():
    if sys.argv[1] == "cs336":
        print(json.dumps([figures_of_attention(*row) for row in json.load(sys.stdin)]))
        return
    for function in GROUPS[sys.argv[1]]:
        torch._dynamo.reset()
        counters.clear()
        function()
        print(function.__name__, flush=True)


if __name__ == "__main__":
    main()
