"""Programs on a simulated GPU, each a function of a group: python device_scenarios.py GROUP runs them."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path

import memcheck

GROUPS: dict[str, list] = {}
GPUS = 2 if sys.argv[1:] == ["gpus"] else 1
memcheck.simulate("A100-40GB", gpus=GPUS)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from memcheck.simulated.doubts import doubts  # noqa: E402

MIB = 2**20
cuda = torch.cuda


def group(name):
    def add(function):
        GROUPS.setdefault(name, []).append(function)
        return function

    return add


def doubted() -> int:
    """How often numbers were asked that are not computed. Other doubts are about memory."""
    return sum(doubt.count for doubt in doubts() if "number" in doubt.what)


def error_of(call) -> str:
    """The words of its error; empty if it has none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@group("memory")
def the_device_is_as_the_catalog_says():
    assert cuda.is_available()
    assert cuda.device_count() == 1
    assert cuda.get_device_capability() == (8, 0)
    assert cuda.is_bf16_supported()
    assert cuda.get_device_properties(0).total_memory == cuda.mem_get_info()[1]


@group("memory")
def small_requests_share_a_segment_and_large_ones_are_rounded():
    cuda.empty_cache()
    before = cuda.memory_allocated()
    small = torch.empty(1000, device="cuda")  # 4,000 bytes take 4,096.
    assert cuda.memory_allocated() - before == 4096
    assert cuda.memory_reserved() >= 2 * MIB
    large = torch.empty(30522, 1024, device="cuda")  # The rest of 0.77 MiB is not split off 120 MiB.
    assert cuda.memory_allocated() - before == 4096 + 120 * MIB
    del small, large
    cuda.reset_peak_memory_stats()
    assert cuda.memory_allocated() == cuda.max_memory_allocated() == before


@group("memory")
def out_of_memory_is_torchs_error_and_a_script_may_go_on():
    size = 1

    def take():
        return torch.empty(size << 30, dtype=torch.uint8, device="cuda")

    while not (words := error_of(take)):
        size *= 2
    assert words.startswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity"
    )
    assert cuda.memory_stats()["num_ooms"] == 1
    cuda.empty_cache()
    cuda.set_per_process_memory_fraction(0.1)
    size = 6
    assert "3.94 GiB allowed" in error_of(take)
    cuda.set_per_process_memory_fraction(1.0)
    assert torch.ones(3, device="cuda").sum().item() == 3


@group("memory")
def a_block_that_another_stream_uses_is_free_later():
    side = cuda.Stream()
    x = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    with cuda.stream(side):
        x.record_stream(cuda.current_stream())
    active = cuda.memory_stats()["active_bytes.all.current"]
    allocated = cuda.memory_allocated()
    del x
    assert cuda.memory_allocated() == allocated - 5 * MIB
    assert cuda.memory_stats()["active_bytes.all.current"] == active
    torch.empty(1, device="cuda")
    assert cuda.memory_stats()["active_bytes.all.current"] < active


@group("memory")
def a_recorded_history_has_every_event_with_its_line():
    cuda.memory._record_memory_history("all")
    torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        cuda.memory._dump_snapshot(str(path))
        snapshot = pickle.loads(path.read_bytes())
    cuda.memory._record_memory_history(None)
    (trace,) = snapshot["device_traces"]
    allocated = [entry for entry in trace if entry["action"] == "alloc"]
    assert [entry["size"] for entry in allocated] == [3 * MIB]
    assert any(frame["filename"] == __file__ for frame in allocated[0]["frames"])
    assert [entry["action"] for entry in trace][-2:] == ["free_requested", "free_completed"]


@group("contents")
def numbers_of_small_tensors_are_computed():
    x = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]).cuda()
    before = doubted()
    assert x.tolist() == [3, 1, 4, 1, 5, 9, 2, 6]
    assert (x.sum().item(), x.argmax().item(), x.float().mean().item()) == (31, 5, 3.875)
    assert (x > 3).nonzero().flatten().tolist() == [2, 4, 5, 7]
    assert x[x > 3].tolist() == [4, 5, 9, 6]
    assert torch.unique(x).tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert torch.where(torch.arange(8, device="cuda") < 4, x, 0).cumsum(0).tolist() == [3, 4, 8, 9, 9, 9, 9, 9]
    x[0] = 7
    assert x.masked_fill(x > 4, 0).tolist() == [0, 1, 4, 1, 0, 0, 2, 0]
    assert torch.repeat_interleave(x[:3], x[:3]).numel() == 12
    assert bool(torch.ones(4096, 4096, device="cuda").all())
    assert doubted() == before


@group("contents")
def a_number_that_is_not_computed_reads_one_with_a_doubt():
    x = torch.randn(500, 500, device="cuda") @ torch.randn(500, 500, device="cuda")
    before = doubted()
    assert x.mean().item() == 1.0
    (found,) = [doubt for doubt in doubts() if doubt.file == __file__ and "(float32)" in doubt.what]
    assert found.count == 1
    assert doubted() == before + 1
    assert x.argmax().item() == 0
    assert not torch.isnan(x).any().item()
    assert x[x > 0].shape == (250_000,)


@group("contents")
def a_loop_that_ends_when_a_tensor_says_so_ends():
    tokens = torch.zeros(2, 1, dtype=torch.long, device="cuda")
    weight = torch.randn(512, 512, device="cuda")
    while True:
        logits = functional.one_hot(tokens[:, -1], 512).float() @ weight
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
        done = (tokens[:, -1] == 7) | torch.full((2,), tokens.shape[1] >= 20, device="cuda")
        if bool(done.all()):
            break
    assert tokens.shape[1] == 20


@group("contents")
def a_count_that_is_not_computed_is_the_largest():
    scores = torch.randn(300, 300, device="cuda") @ torch.randn(300, 300, device="cuda")
    assert int((scores > 0).sum(1).max()) == 300


@group("contents")
def a_scaler_of_gradients_sees_no_infinity():
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(4096, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2048.0


@group("contents")
def small_training_gives_the_numbers_of_the_cpu():
    def losses(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        x, y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
        model.to(device)
        x, y = x.to(device), y.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        found = []
        for _ in range(3):
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.testing.assert_close(losses("cuda"), losses("cpu"))


@group("errors")
def operands_of_two_devices_are_refused_in_torchs_words():
    x, y = torch.ones(3, 3, device="cuda"), torch.ones(3, 3)
    for call in (lambda: x @ y, lambda: x + y):
        assert "Expected all tensors to be on the same device" in error_of(call)
    assert (torch.ones(3, device="cuda") + torch.tensor(2.0)).tolist() == [3, 3, 3]


@group("errors")
def shapes_that_do_not_fit_are_refused_in_torchs_words():
    x = torch.ones(3, 4, device="cuda")
    words = error_of(lambda: x @ x)
    assert "[3, 4] X [3, 4]" in words or "(3x4 and 3x4)" in words


@group("errors")
def what_has_no_answer_raises_its_name():
    name = "_cuda_jiterator_compile_and_launch_kernel"
    assert error_of(lambda: getattr(torch._C, name)("", "", 0, (), {})).startswith(
        f"NotImplementedError: torch._C.{name}"
    )
    x = torch.randn(300, 300, device="cuda") @ torch.randn(300, 300, device="cuda")
    assert error_of(lambda: torch.repeat_interleave(x[0].long())).startswith(
        "NotImplementedError: aten::repeat_interleave"
    )


@group("errors")
def a_forked_process_is_refused_in_torchs_words():
    if not hasattr(os, "fork"):
        return
    torch.ones(1, device="cuda")
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, error_of(lambda: torch.ones(1).cuda()).encode())
        os._exit(0)
    os.wait()
    assert "Cannot re-initialize CUDA in forked subprocess" in os.read(reader, 1000).decode()


@group("host")
def a_model_larger_than_this_machine_takes_no_memory():
    resident = Path("/proc/self/statm")
    if not resident.is_file():
        return
    before = int(resident.read_text().split()[1])
    model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(40)))  # 10 GiB
    model.half().cuda()
    assert cuda.memory_allocated() > 5 * 2**30
    assert int(resident.read_text().split()[1]) - before < 100 * 256  # pages of 4 KiB


@group("host")
def real_numbers_of_the_host_stay():
    x = torch.arange(8 * MIB)
    assert x[-1].item() == 8 * MIB - 1
    y = torch.empty_like(x).copy_(x)
    assert y.mul_(2)[-1].item() == 2 * (8 * MIB - 1)


@group("errors")
def a_device_that_is_not_there_is_refused():
    assert "CUDA error: invalid device ordinal" in error_of(lambda: torch.ones(3, device="cuda:3"))
    assert "CUDA error: invalid device ordinal" in error_of(lambda: torch.empty_strided((3,), (1,), device="cuda:1"))


@group("errors")
def tensors_that_are_not_dense_are_multiplied_by_no_kernel_of_a_cuda_build():
    sparse = torch.eye(8).to_sparse_csr().cuda()
    assert "SparseCsrCUDA" in (words := error_of(lambda: sparse @ sparse)) or "on the simulated GPU" in words


@group("memory")
def torchs_profiler_sees_the_device():
    with torch.profiler.profile(profile_memory=True) as profiler:
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    assert "aten::mm" in {event.key for event in profiler.key_averages()}


@group("memory")
def which_attention_takes_a_call_is_answered():
    q = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
    asked = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    assert torch.backends.cuda.can_use_flash_attention(asked)
    assert torch.backends.cuda.can_use_efficient_attention(asked)
    q = q.float()
    assert not torch.backends.cuda.can_use_flash_attention(
        torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    )


@group("gpus")
def two_gpus_have_their_own_memory():
    assert cuda.device_count() == 2
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
    assert (cuda.memory_allocated(0), cuda.memory_allocated(1)) == (0, MIB)
    with cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1
    assert x.to("cuda:0").device.index == 0
    assert "cuda:1" in error_of(lambda: x + x.to("cuda:0"))


@group("gpus")
def data_parallel_runs_on_both():
    model = nn.DataParallel(nn.Linear(64, 64).cuda())
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    assert model.module.weight.grad is not None
    assert cuda.max_memory_allocated(1) > 0


if __name__ == "__main__":
    for function in GROUPS[sys.argv[1]]:
        function()
        print(function.__name__, flush=True)
