"""Trackers count to the byte and do not change results."""

import copy
import ctypes
import gc
import io
import os
import pickle
import random
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import run_python
from small_attention import leaf
from torch.multiprocessing.reductions import StorageWeakRef

import memcheck
from memcheck._extension import _C
from memcheck.measure import tracker as tracking

KIB = 1024


def block(count):
    return torch.empty(count, dtype=torch.uint8)


# Counting.


def test_counts_the_bytes_requested():
    with memcheck.track() as memory:
        kept = block(1001)
        block(999)
        assert (memory.current_bytes, memory.peak_bytes) == (1001, 2000)
        del kept
        assert (memory.current_bytes, memory.peak_bytes) == (0, 2000)


def test_empty_tensors_count_nothing():
    with memcheck.track() as memory:
        kept = [block(0), torch.empty(3, 0, 5)]
        assert (memory.current_bytes, memory.peak_bytes) == (0, 0)
        assert [tensor.data_ptr() for tensor in kept] == [0, 0]


def test_data_keeps_torch_alignment():
    with memcheck.track():
        assert all(block(count).data_ptr() % 64 == 0 for count in (1, 63, 127, 129, 1 << 20))


def test_figures_stay_after_the_block():
    with memcheck.track() as memory:
        kept = block(100)
        block(50)
    block(10_000)
    assert (memory.current_bytes, memory.peak_bytes, kept.numel()) == (100, 150, 100)
    with pytest.raises(RuntimeError, match="closed"):
        memory.reset_peak()


def test_reset_peak_starts_from_what_is_alive():
    with memcheck.track() as memory:
        kept = block(100)
        block(50)
        memory.reset_peak()
        assert memory.peak_bytes == 100
        block(20)
        assert memory.peak_bytes == 120
        assert kept.numel() == 100


def test_nested_trackers_keep_their_own_peaks():
    with memcheck.track() as outer:
        block(500)
        kept = block(100)
        with memcheck.track() as inner:
            block(30)
            inner.reset_peak()
            block(20)
        assert (inner.peak_bytes, outer.peak_bytes, outer.current_bytes) == (20, 500, kept.nbytes)
        outer.reset_peak()
        block(40)
        assert outer.peak_bytes == 140


def test_one_tracker_is_used_again_but_not_twice_at_once():
    memory = memcheck.track()
    with memory:
        block(100)
        with pytest.raises(RuntimeError, match="already open"):
            memory.__enter__()
    with memory:
        assert memory.peak_bytes == 0


def test_before_the_block_there_are_no_figures():
    with pytest.raises(RuntimeError, match="never opened"):
        _ = memcheck.track().peak_bytes


def test_an_error_in_the_block_closes_the_tracker():
    memory = memcheck.track()
    with pytest.raises(KeyError), memory:
        block({}["no such key"])
    assert memory.peak_bytes == 0
    assert tracking._listeners.open == []


def test_scratch_inside_kernels_counts():
    values = torch.rand(64, 64)
    with memcheck.track() as memory:
        torch.linalg.inv(values)
    # The result, its transpose for LAPACK, pivots and work: more than the output alone.
    assert memory.current_bytes == 0
    assert memory.peak_bytes > values.nbytes


def test_all_threads_count():
    sizes = [KIB * (index + 1) for index in range(8)]
    everyone = threading.Barrier(len(sizes))

    def work(size):
        for _ in range(200):
            block(7)
        everyone.wait()
        kept = block(size)
        everyone.wait()
        del kept

    with memcheck.track() as memory:
        threads = [threading.Thread(target=work, args=(size,)) for size in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (memory.current_bytes, memory.peak_bytes) == (0, sum(sizes))


def test_many_blocks_are_freed_in_another_order():
    with memcheck.track() as memory:
        kept = [block(count) for count in range(1, 5001)]
        assert memory.current_bytes == sum(range(5001))
        random.Random(0).shuffle(kept)
        del kept[2500:]
        assert memory.current_bytes == sum(tensor.nbytes for tensor in kept)
    with memcheck.track() as memory:
        freed = sum(tensor.nbytes for tensor in kept)
        kept.clear()
        assert (memory.current_bytes, memory.peak_bytes) == (-freed, 0)


def test_threads_free_at_once():
    """This operator frees many small blocks, and does not hold Python's lock meanwhile."""
    values = torch.randn(64, 2, 2)

    def work():
        for _ in range(3000):
            torch.linalg.matrix_exp(values)

    with memcheck.track() as memory:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert memory.current_bytes == 0


def test_counters_open_and_close_in_any_order():
    first = _C.AllocationTracker()
    second = _C.AllocationTracker()
    kept = [block(10)]
    first.close()
    kept.append(block(20))
    third = _C.AllocationTracker()
    kept.append(block(40))
    assert (second.current_bytes(), third.current_bytes()) == (70, 40)
    second.close()
    third.close()
    with pytest.raises(RuntimeError, match="closed"):
        third.current_bytes()


def test_sixty_four_counters_and_no_more():
    counters = [_C.AllocationTracker() for _ in range(64)]
    kept = block(10)
    with pytest.raises(RuntimeError, match="at most 64 memory trackers"):
        _C.AllocationTracker()
    assert {counter.current_bytes() for counter in counters} == {kept.nbytes}


def test_a_counter_opened_on_another_thread_closes_here():
    opened = []
    thread = threading.Thread(target=lambda: opened.append(_C.AllocationTracker()))
    thread.start()
    thread.join()
    block(10)
    assert opened[0].peak_bytes() == 10
    opened[0].close()


# Blocks that are allocated or freed outside of tracking.


def test_blocks_from_before_are_freed_after():
    before = block(KIB)
    with memcheck.track() as memory:
        del before
        assert memory.current_bytes == 0


def test_blocks_of_one_tracker_are_freed_under_the_next():
    with memcheck.track():
        kept = block(KIB)
    with memcheck.track() as memory:
        del kept
        assert (memory.current_bytes, memory.peak_bytes) == (-KIB, 0)


def test_blocks_freed_after_switching_off():
    with memcheck.track() as memory:
        kept = [block(KIB + index) for index in range(100)]
    del kept
    with memcheck.track() as memory:
        assert memory.current_bytes == 0


def test_resize_during_and_after():
    with memcheck.track() as memory:
        kept = torch.arange(10, dtype=torch.uint8)
        kept.resize_(1000)
        assert (memory.current_bytes, memory.peak_bytes) == (1000, 1010)
    kept.resize_(5000)
    assert kept[:10].tolist() == list(range(10))
    del kept
    with memcheck.track() as memory:
        assert memory.current_bytes == 0


def test_lazy_clone_is_counted_when_it_is_written():
    before = torch.ones(25)
    with memcheck.track() as memory:
        values = torch.ones(50)
        clone, clone_of_before = torch._lazy_clone(values), torch._lazy_clone(before)
        assert memory.current_bytes == 200
        clone.add_(1)
        assert memory.current_bytes == 400
    late = torch._lazy_clone(values)
    late.add_(2)
    clone_of_before.add_(1)
    assert (values.sum(), clone.sum(), late.sum(), before.sum(), clone_of_before.sum()) == (50, 100, 150, 25, 50)


def test_save_and_load():
    with memcheck.track() as memory:
        values, file = torch.arange(100.0), io.BytesIO()
        torch.save(values, file)
        file.seek(0)
        loaded = torch.load(file)
        assert torch.equal(values, loaded)
        assert memory.current_bytes == 800


@pytest.mark.isolated
def test_sharing_memory():
    with memcheck.track():
        values = torch.arange(100.0).share_memory_()
    assert values.is_shared()
    assert values.add_(1).sum() == 5050


# Counted and uncounted memory of 1 KiB each: (bytes at the end, peak).


def from_numpy(folder):
    return torch.from_numpy(np.ones(KIB, np.uint8))


def copied_from_numpy(folder):
    return torch.tensor(np.ones(KIB, np.uint8))


def viewed_by_numpy(folder):
    return block(KIB).numpy()


def saved_tensor(folder):
    torch.save(torch.zeros(KIB, dtype=torch.uint8), folder / "tensor.pt")
    return folder / "tensor.pt"


def loaded(folder):
    return torch.load(saved_tensor(folder))


def loaded_by_mmap(folder):
    return torch.load(saved_tensor(folder), mmap=True)


def from_file(folder):
    return torch.from_file(str(folder / "raw"), shared=True, size=KIB, dtype=torch.uint8)


def from_buffer(folder):
    return torch.frombuffer(bytearray(KIB), dtype=torch.uint8)


def shared(folder):
    return block(KIB).share_memory_()


@pytest.mark.parametrize(
    ("make", "current_bytes", "peak_bytes"),
    [
        (from_numpy, 0, 0),
        (copied_from_numpy, KIB, KIB),
        (viewed_by_numpy, KIB, KIB),
        (loaded, KIB, KIB),
        (loaded_by_mmap, 0, KIB),
        (from_file, 0, 0),
        (from_buffer, 0, 0),
        (shared, 0, KIB),
    ],
)
def test_memory_that_does_not_come_from_torch_is_not_counted(make, current_bytes, peak_bytes, tmp_path):
    with memcheck.track(saved=False) as memory:
        kept = make(tmp_path)
        assert memory.current_bytes == current_bytes
        # torch.load(mmap=True) unpickles a few hundred bytes.
        assert peak_bytes <= memory.peak_bytes < peak_bytes + KIB
    assert len(kept) == KIB


def test_of_storages_from_before_only_new_memory_counts():
    freed, grown, emptied = block(KIB), block(KIB), block(KIB)
    with memcheck.track(saved=False) as memory:
        del freed
        emptied.untyped_storage().resize_(0)
        assert memory.current_bytes == 0
        grown.untyped_storage().resize_(2 * KIB)
        assert memory.current_bytes == 2 * KIB
        emptied.untyped_storage().resize_(3 * KIB)
        assert memory.current_bytes == 5 * KIB
        del grown, emptied
        assert memory.current_bytes == 0


DATA = pickle.dumps(torch.zeros(KIB, dtype=torch.uint8))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: copy.deepcopy(x),
        lambda x: pickle.loads(DATA),
        lambda x: torch.UntypedStorage(KIB),
        lambda x: x.untyped_storage().clone(),
        lambda x: copy.deepcopy({"weight": x})["weight"],
        lambda x: copy.deepcopy(torch.nn.ParameterList([torch.nn.Parameter(x, requires_grad=False)])),
    ],
)
def test_storages_of_the_default_allocator_count(make):
    x = block(KIB)
    with memcheck.track(saved=False) as memory:
        kept = make(x)
        assert memory.current_bytes == KIB
        del kept
        assert memory.current_bytes == 0
    assert torch.equal(copy.deepcopy(x), x)


def test_copies_have_a_budget():
    with memcheck.track(memory_limit=KIB) as memory, pytest.raises(torch.OutOfMemoryError, match="over the budget"):
        torch.UntypedStorage(KIB + 1)
    assert memory.refusal == (KIB + 1, 0)


def test_what_mkl_allocates_is_not_counted():
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if not hasattr(library, "mkl_serv_mem_stat"):
        pytest.skip("this torch has no MKL")
    library.mkl_serv_mem_stat.restype = ctypes.c_int64
    a, b, out = torch.ones(3, 512, 512)
    with memcheck.track(saved=False) as memory:
        torch.mm(a, b, out=out)
    assert memory.peak_bytes == 0
    assert library.mkl_serv_mem_stat(ctypes.byref(ctypes.c_int())) > 0


def test_onednn_convolutions():
    module, image = torch.nn.Conv2d(16, 16, 3, padding=1), leaf(2, 16, 9, 9)
    expected = torch.autograd.grad(module(image).square().sum(), image)[0]
    with memcheck.track(module, image):
        actual = torch.autograd.grad(module(image).square().sum(), image)[0]
    assert torch.equal(expected, actual)


def test_onednn_tensors_are_freed_within_and_after():
    """Their blocks come from raw_allocate, and are freed by whichever allocator is installed then."""
    before, dense = torch.ones(8, 8).to_mkldnn(), torch.ones(8, 8)
    with memcheck.track(saved=False) as memory:
        kept, freed = dense.to_mkldnn(), dense.to_mkldnn()
        del before, freed
        assert (memory.current_bytes, memory.peak_bytes) == (256, 512)
    assert torch.equal(kept.to_dense(), dense)
    del kept
    assert torch.equal(torch.ones(8, 8).to_mkldnn().to_dense(), dense)


def test_blocks_that_are_not_mallocs(require_tool, tmp_path):
    """As on Linux aarch64, where torch allocates by mimalloc: tests of this file with other allocation functions."""
    library, source = tmp_path / "mapped_blocks.so", Path(__file__).parent / "mapped_blocks.cpp"
    subprocess.run([require_tool("c++"), "-shared", "-fPIC", source, "-o", library], check=True)
    code = """
import sys, pytest, torch
assert torch.empty(100, dtype=torch.uint8).data_ptr() % 4096 == 4096 - 128  # a block of the library
sys.exit(pytest.main(sys.argv[1:]))
"""
    others = "compiled or threads_free_at_once or profiler or mallocs"
    words = ["-q", "-n0", "-p", "no:cacheprovider", "-m", "not isolated", "-k", f"not ({others})"]
    files = [Path(__file__), Path(__file__).parent / "test_tracker_random.py"]
    environment = {**os.environ, "LD_PRELOAD": str(library), "MEMCHECK_FUZZ_CASES": "500"}
    ended = run_python("-c", code, *words, *files, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_profiler_sees_the_sizes():
    with (
        memcheck.track(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        kept = torch.empty(12345, dtype=torch.uint8)
        del kept
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sizes.count(12345) == sizes.count(-12345) == 1


@pytest.mark.smoke
@pytest.mark.isolated
def test_forked_data_loader_workers():
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    with memcheck.track() as memory:
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
        total = sum(batch.sum().item() for (batch,) in loader)
        assert total == 2016
        del loader
    assert memory.peak_bytes > 0


@pytest.mark.isolated
def test_a_fork_while_threads_allocate():
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            block(KIB)

    block(KIB)  # torch takes its locks for initialisation here, and not in another thread during a fork
    threads = [threading.Thread(target=churn) for _ in range(3)]
    with memcheck.track():
        for thread in threads:
            thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                inside = _C.AllocationTracker()
                block(KIB)
                os._exit(inside.peak_bytes() != KIB)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join()


# Budgets.


@pytest.mark.isolated
def test_a_budget_covers_what_is_held():
    held = block(600)
    with memcheck.track(held, memory_limit=1000) as memory:
        kept = block(400)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            block(1)
        message = "memcheck: tried to allocate 1 bytes with 1000 bytes in use, over the budget of 1000 bytes"
        assert str(caught.value).splitlines()[0] == message
        assert memory.refusal == (1, 1000)
        assert (memory.current_bytes, memory.peak_bytes) == (400, 400)
        del kept
        assert block(400).numel() == 400
    assert block(10_000).numel() == 10_000
    assert memory.refusal == (1, 1000)


@pytest.mark.isolated
def test_the_tightest_of_several_budgets_holds():
    with memcheck.track(memory_limit=1000) as outer:
        kept = block(300)
        with memcheck.track(memory_limit=5000) as inner:
            with pytest.raises(
                torch.OutOfMemoryError, match="701 bytes with 300 bytes in use, over the budget of 1000"
            ):
                block(701)
            assert (outer.refusal, inner.refusal) == ((701, 300), (701, 0))
    assert kept.nbytes == 300


@pytest.mark.isolated
def test_budgets_stop_backward_as_well():
    x = leaf(1000)
    with memcheck.track(x, memory_limit=11_000):
        y = x.exp()
        with pytest.raises(torch.OutOfMemoryError):
            y.backward(torch.ones(1000))
    assert x.grad is None


@pytest.mark.isolated
def test_the_machine_running_out_is_out_of_memory_too():
    with memcheck.track() as memory:
        with pytest.raises(torch.OutOfMemoryError, match="can't allocate memory"):
            block(1 << 48)
        assert memory.refusal == (1 << 48, 0)
        assert (memory.current_bytes, memory.peak_bytes) == (0, 0)


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_bad_budgets_are_named(limit):
    with pytest.raises(ValueError, match="memory_limit must be a positive number of bytes, got"):
        memcheck.track(memory_limit=limit)


# Held tensors, and tensors that autograd saves.


def test_held_bytes_count_storages_once():
    x = torch.zeros(100)
    module = torch.nn.BatchNorm1d(4)
    held = memcheck.track([x, x[10:], {"again": (x.view(10, 10), 3, None)}], module, module.parameters())
    assert held.held_bytes == 400 + 4 * (4 + 4 + 4 + 4) + 8


@pytest.mark.filterwarnings("ignore:Sparse")
def test_held_sparse_tensors_count_their_parts():
    matrix = torch.eye(4)
    assert memcheck.track(matrix.to_sparse()).held_bytes == 2 * 4 * 8 + 4 * 4
    starts, columns, values = torch.arange(5), torch.arange(4), torch.ones(4)
    assert memcheck.track(torch.sparse_csr_tensor(starts, columns, values)).held_bytes == 5 * 8 + 4 * 8 + 4 * 4


def test_saved_bytes_leave_out_what_is_held():
    x = leaf(100)
    with memcheck.track(x) as memory:
        y = (x * x).exp()
        assert memory.saved_bytes == 400
        memory.hold(y)
        assert memory.saved_bytes == 0


def test_storages_are_told_apart_by_identity():
    x = leaf(100)
    with memcheck.track(x) as memory:
        first = x.exp()
        first_pointer = first.data_ptr()
        del first
        second = x.exp()
    assert memory.saved_bytes == 800
    assert first_pointer
    assert second.numel() == 100


def test_all_trackers_of_the_thread_see_saved_tensors():
    x = leaf(100)
    with memcheck.track(x) as outer:
        y = x.exp()
        with memcheck.track(x, y) as inner:
            z = y.exp()
        with memcheck.track():
            pass
        z = z.exp()
    assert (outer.saved_bytes, inner.saved_bytes) == (1200, 400)
    assert z.numel() == 100


def test_an_inner_tracker_does_not_close_the_outer_one():
    x = leaf(100)
    with memcheck.track(x) as outer:
        with memcheck.track(x):
            pass
        y = x.exp()
    assert outer.saved_bytes == y.nbytes


def test_tracking_does_not_prolong_lives():
    gc.disable()
    try:
        x = leaf(100)
        with memcheck.track(x) as memory:
            y = x.exp()
            storage = StorageWeakRef(y.untyped_storage())
            del y
            assert memory.current_bytes == 0
        assert storage.expired()
    finally:
        gc.enable()


def test_in_place_changes_are_still_caught():
    x = leaf(4)
    with memcheck.track():
        y = x.exp()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_of_gradients():
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with memcheck.track():
        assert torch.autograd.gradgradcheck(lambda x: x.exp() * x, x)


def test_hooks_from_outside_still_run():
    x, packed = leaf(4), []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with memcheck.track() as memory:
            y = x.exp()
        y.sum().backward()
    assert packed == [(4,)]
    assert memory.saved_bytes == 16


def test_without_saved_bytes_there_are_no_hooks():
    x = torch.randn(100)
    with memcheck.track(x, saved=False) as memory:
        gradient = torch.func.grad(lambda x: x.exp().sum())(x)
        assert memory.current_bytes == gradient.nbytes
    with pytest.raises(RuntimeError, match="saved=False"):
        _ = memory.saved_bytes


def test_trackers_close_in_any_order():
    x = leaf(100)
    first, second = memcheck.track(x), memcheck.track(x)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    y = x.exp()
    second.__exit__(None, None, None)
    assert (first.saved_bytes, second.saved_bytes, second.current_bytes) == (0, y.nbytes, y.nbytes)


def test_compiled_functions():
    x = leaf(100)
    compiled = torch.compile(lambda x: x.exp().sin(), backend="aot_eager", fullgraph=True)
    with memcheck.track(x) as memory:
        y = compiled(x)
        memory.hold(y)
        assert memory.saved_bytes > 0
        y.sum().backward()
    assert torch.allclose(x.grad, x.exp().cos() * x.exp())


@pytest.mark.filterwarnings("error")
def test_compiled_code_breaks_its_graph_at_a_tracker(capfd):
    def tracked(x):
        with memcheck.track(x) as memory:
            y = x.sin()
            memory.hold(y)
        return y.cos(), memory.held_bytes

    x = torch.ones(25)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"memcheck\.track cannot be traced: open it around the call"
    ):
        torch.compile(tracked, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
    y, held_bytes = torch.compile(tracked, backend="eager")(x)
    assert torch.equal(y, x.sin().cos())
    assert held_bytes == 200
    gc.collect()
    assert capfd.readouterr().err == ""  # of objects that torch.compile made without __init__


def test_devices():
    assert memcheck.track().device == torch.device("cpu")
    assert memcheck.track(device="cpu:0").device == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'meta'"):
        memcheck.track(device="meta")


def test_figures_by_device():
    x = leaf(100)
    with memcheck.track(x) as memory:
        y = x.exp().sin()
        assert memory.by_device == {"cpu": tracking.DeviceMemory(peak_bytes=800, current_bytes=800, saved_bytes=400)}
        assert repr(memory) == "MemoryTracker(cpu: peak 800 B, now 800 B, saved 400 B)"
    assert memory.by_device["cpu"].current_bytes == 2 * y.nbytes
    with memcheck.track(saved=False) as memory:
        assert memory.by_device == {"cpu": tracking.DeviceMemory(0, 0, None)}
    assert repr(memcheck.track()) == "MemoryTracker()"


def test_saved_tensors_are_listed_the_largest_first():
    x, y = leaf(100), leaf(10, 3)
    with memcheck.track(x, y) as memory:
        kept = [y.exp()[:, 1].sin(), x.exp()]
    listed = [(tensor.bytes, tensor.shape, tensor.dtype) for tensor in memory.saved_tensors]
    assert listed == [(400, (100,), "float32"), (120, (10, 3), "float32")]
    memory.hold(kept)
    assert [tensor.bytes for tensor in memory.saved_tensors] == [120]


def test_a_tracker_is_closed_where_it_was_opened():
    memory = memcheck.track()
    errors = []

    def close():
        try:
            memory.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with memory:
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
    assert errors == ["this memory tracker was opened on another thread, and its hooks are there"]


def test_a_budget_is_no_truth_value():
    with pytest.raises(ValueError, match="memory_limit must be a positive number of bytes, got True"):
        memcheck.track(memory_limit=True)
