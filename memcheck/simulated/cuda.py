"""What torch.cuda asks of torch._C, answered for a simulated GPU. The Python code of torch.cuda stays torch's own."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from memcheck.simulated.graphs import answers_of_graphs, named_function
from memcheck.simulated.library import Target, library, refused
from memcheck.simulated.statistics import memory_stats, record_history, record_history_legacy, snapshot_of

CUDA, CUDNN, NCCL = "13.0", 91002, (2 << 32) + (28 << 16) + 9


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing, as on a device whose kernels take no time."""


class Answers:
    """The functions of torch._C that a build of torch for CUDA has, for `give`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._owner: int | None = None  # The process that has initialised the GPU.
        self._settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        self._observers: list[Callable[..., object]] = []
        if self._settings:
            refused(library().configure(self._settings.encode(), True))
        listener = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
        self._listener = listener(self._tell_observers)  # As long as the library calls it.
        library().listen_to_refusals(self._listener)

    def give(self, c: ModuleType) -> None:
        """Sets the names of torch._C."""
        for name, answer in {**self._of_devices(), **self._of_memory(), **self._of_the_rest()}.items():
            setattr(c, name, answer if isinstance(answer, type) else named_function(name, answer))
        for name, value in self._values(c).items():
            setattr(c, name, value)
        for name, answer in answers_of_graphs(c).items():
            setattr(c, name, answer)
        sys.modules["torch._C._cudart"] = c._cudart
        refuse_others(c)

    def _tell_observers(self, device: int, size: int, total: int, free: int) -> None:
        for observer in self._observers:
            observer(device, size, total, free)

    def _of_devices(self) -> dict[str, Callable[..., Any]]:
        return {
            "_cuda_init": self._init,
            "_cuda_isInBadFork": lambda: self._owner not in (None, os.getpid()),
            "_cuda_getDeviceCount": lambda: self._target.gpus,
            "_cuda_getDevice": lambda: library().current_device(),
            "_cuda_setDevice": exchange_device,
            "_cuda_exchangeDevice": exchange_device,
            "_cuda_maybeExchangeDevice": exchange_device,
            "_cuda_hasPrimaryContext": lambda _device: True,
            "_cuda_canDeviceAccessPeer": lambda _device, _peer: True,
            "_cuda_getArchFlags": lambda: "sm_{}{}".format(*self._target.capability),
            "_cuda_getCompiledVersion": lambda: int(CUDA.partition(".")[0]) * 1000,
            "_cuda_synchronize": nothing,
            "_cuda_getCurrentStream": lambda device: (library().current_stream(max(device, 0)), max(device, 0), 1),
            "_cuda_getDefaultStream": lambda device: (0, max(device, 0), 1),
            "_cuda_getCurrentRawStream": lambda device: library().current_stream(max(device, 0)),
            "_cuda_getStreamFromExternal": lambda pointer, device: (pointer, device, 1),
            "_cuda_setStream": set_stream,
            "_cuda_getCurrentBlasHandle": lambda: 1,
            "_cuda_getCurrentSolverHandle": lambda: 1,
        }

    def _of_memory(self) -> dict[str, Callable[..., Any]]:
        lib = library()
        return {
            "_cuda_memoryStats": memory_stats,
            "_cuda_resetPeakMemoryStats": lib.reset_peaks,
            "_cuda_resetAccumulatedMemoryStats": lib.reset_accumulated,
            "_cuda_hostMemoryStats": lambda: {},
            "_cuda_resetPeakHostMemoryStats": nothing,
            "_cuda_resetAccumulatedHostMemoryStats": nothing,
            "_cuda_emptyCache": lambda pool=(0, 0): lib.empty_cache(*pool),
            "_host_emptyCache": nothing,
            "_cuda_setMemoryFraction": self._set_fraction,
            "_cuda_getMemoryFraction": self._fraction,
            "_cuda_memorySnapshot": lambda given=None: snapshot_of(self._settings, given),
            "_cuda_record_memory_history": record_history,
            "_cuda_record_memory_history_legacy": record_history_legacy,
            "_cuda_isHistoryEnabled": lambda: bool(lib.is_recording()),
            "_cuda_attach_out_of_memory_observer": self._observers.append,
            "_cuda_setMemoryMetadata": lambda text: lib.note(text.encode()),
            "_cuda_getMemoryMetadata": lambda: lib.noted().decode(),
            "_accelerator_setAllocatorSettings": self._configure,
            "_cuda_cudaCachingAllocator_set_allocator_settings": self._configure,
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
            "_cuda_cudaCachingAllocator_enable": nothing,
            "_cuda_cudaHostAllocator": lambda: 0,
            "_cuda_allocationTraceback": nothing,
            "_cuda_clearCublasWorkspaces": lib.drop_workspaces,
            "_cuda_ipc_collect": nothing,
        }

    def _of_the_rest(self) -> dict[str, Callable[..., Any]]:
        state = {"sync": 0, "benchmark": 10}
        return {
            "_cuda_set_sync_debug_mode": lambda mode: state.update(sync=mode),
            "_cuda_get_sync_debug_mode": lambda: state["sync"],
            "_cuda_set_cudnn_benchmark_limit": lambda limit: state.update(benchmark=limit),
            "_cuda_get_cudnn_benchmark_limit": lambda: state["benchmark"],
            "_cuda_get_conv_benchmark_empty_cache": lambda: True,
            "_cudnn_set_conv_benchmark_empty_cache": nothing,
            "_cuda_sleep": nothing,
            "_cuda_lock_mutex": nothing,
            "_cuda_unlock_mutex": nothing,
            "_cuda_tunableop_is_enabled": lambda: False,
            "_cuda_tunableop_tuning_is_enabled": lambda: False,
            "_cuda_record_untuned_is_enabled": lambda: False,
            "_nccl_version": lambda: NCCL,
            "_nccl_version_suffix": lambda: b"",
            "_scatter": scatter,
            "_gather": gather,
            "_broadcast": lambda tensor, devices: [tensor.to(f"cuda:{device}") for device in devices],
            "_broadcast_out": lambda tensor, outs: [out.copy_(tensor) for out in outs],
            "_broadcast_coalesced": lambda tensors, devices, _size: [
                [tensor.to(f"cuda:{device}") for tensor in tensors] for device in devices
            ],
        }

    def _values(self, c: Any) -> dict[str, Any]:
        return {
            "_has_cuda": True,
            "_has_cudnn": True,
            "_has_magma": True,
            "has_cuda": True,
            "_CudaDeviceProperties": DeviceProperties,
            "_CudaStreamBase": stream_class(c),
            "_CudaEventBase": event_class(c),
            "_cudart": cudart(),
            "_cudnn": SimpleNamespace(
                is_cuda=True,
                getVersionInt=lambda: CUDNN,
                getRuntimeVersion=lambda: (9, 10, 2),
                getCompileVersion=lambda: (9, 10, 2),
                RNNMode=SimpleNamespace(rnn_relu=0, rnn_tanh=1, lstm=2, gru=3),
            ),
            "_nvtx": nvtx(),
        }

    def _init(self) -> None:
        """What the initialisation of CUDA sets in torch.cuda."""
        from memcheck.simulated import rules

        rules.refuse_forks()
        self._owner = os.getpid()
        torch: Any = sys.modules["torch"]
        devices = [torch.device("cuda", index) for index in range(self._target.gpus)]
        torch.cuda._get_device_properties = lambda device: DeviceProperties(self._target, device)
        torch.cuda.default_generators = (
            tuple(torch._C._get_accelerator_generator(each) for each in devices)
            if hasattr(torch._C, "_get_accelerator_generator")
            else tuple(torch.Generator(device=each) for each in devices)
        )

    def _configure(self, text: str) -> None:
        refused(library().configure(text.encode(), False))
        self._settings = text

    def _set_fraction(self, fraction: float, device: int) -> None:
        library().set_allowed(device, int(fraction * self._target.device.total_bytes))

    def _fraction(self, device: int) -> float:
        allowed = library().allowed(device)
        return 1.0 if allowed == 2**63 - 1 else allowed / self._target.device.total_bytes


def refuse_others(c: ModuleType) -> None:
    """Functions of a CUDA build that have no answer raise NotImplementedError with their names."""
    stub = Path(c.__file__ or "").parent / "_C" / "__init__.pyi"
    text = stub.read_text(encoding="utf-8") if stub.is_file() else ""
    of_build = (name for name in dir(c) if name.startswith("_cuda_"))
    for name in {*re.findall(r"^def (_cuda_\w+)\(", text, re.MULTILINE), *of_build}:
        if not str(getattr(getattr(c, name, None), "__module__", None)).startswith("memcheck."):
            setattr(c, name, named_function(name, refusal(name)))


def refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"torch._C.{name} has no answer on memcheck's simulated GPU")

    return refuse


def exchange_device(device: int) -> int:
    before = library().exchange_device(device)
    if before == -2:
        raise sys.modules["torch"].AcceleratorError(
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"
        )
    return int(before)


def set_stream(stream_id: int = 0, device_index: int = 0, device_type: int = 1) -> None:
    exchange_device(device_index)
    library().exchange_stream(device_index, stream_id)


def scatter(tensor: Any, devices: list[int], sizes: Any = None, dim: int = 0, streams: Any = None) -> list[Any]:
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
    return [part.to(f"cuda:{device}") for part, device in zip(parts, devices, strict=False)]


def gather(tensors: list[Any], dim: int, destination: int | None = None) -> Any:
    device = "cpu" if destination == -1 else f"cuda:{destination or 0}"
    return sys.modules["torch"].cat([tensor.to(device) for tensor in tensors], dim)


class DeviceProperties:
    """torch.cuda.get_device_properties."""

    def __init__(self, target: Target, index: int) -> None:
        self.name = target.device.name
        self.major, self.minor = target.capability
        self.total_memory = target.device.total_bytes
        self.multi_processor_count = target.multiprocessors
        self.shared_memory_per_block_optin, self.max_threads_per_multi_processor = target.limits
        self.shared_memory_per_multiprocessor = self.shared_memory_per_block_optin + 1024
        self.shared_memory_per_block = 48 * 1024
        self.regs_per_multiprocessor = 65536
        self.max_threads_per_block = 1024
        self.warp_size = 32
        self.L2_cache_size = 40 * 2**20
        self.clock_rate, self.memory_clock_rate, self.memory_bus_width = 1_410_000, 1_215_000, 5120
        self.is_integrated = self.is_multi_gpu_board = 0
        self.gcnArchName = ""
        self.uuid = f"00000000-0000-0000-0000-{index:012d}"
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = index, 0, 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


def stream_class(c: Any) -> type:
    class CudaStreamBase(c.Stream):
        """torch._C._CudaStreamBase."""

        def __new__(cls, priority: int = 0, **given: Any) -> Any:
            if "stream_ptr" in given:
                given = {"stream_id": given["stream_ptr"], "device_index": library().current_device()}
            if "stream_id" in given:
                given.setdefault("device_type", 1)
                return super().__new__(cls, **given)
            return super().__new__(cls, device="cuda", priority=priority)

        cuda_stream = property(lambda self: self.stream_id)
        priority = property(lambda self: 0)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    return CudaStreamBase


def event_class(c: Any) -> type:
    class CudaEventBase(c.Event):
        """torch._C._CudaEventBase."""

        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        cuda_event = property(lambda self: id(self))

        def elapsed_time(self, _end: Any) -> float:
            """Milliseconds, the same for all work."""
            return 1.0

    return CudaEventBase


def cudart() -> ModuleType:
    """torch._C._cudart."""

    def memory_of(device: int = 0) -> tuple[int, int]:
        torch: Any = sys.modules["torch"]
        return library().free_bytes(device), torch.cuda.get_device_properties(device).total_memory

    made: Any = ModuleType("torch._C._cudart")
    made.cudaError = SimpleNamespace(success=0)
    made.cudaOutputMode = SimpleNamespace(KeyValuePair=0, CSV=1)
    made.cudaGetErrorString = str
    made.cudaMemGetInfo = memory_of
    for name in ("ProfilerStart", "ProfilerStop", "HostRegister", "HostUnregister", "StreamCreate", "StreamDestroy"):
        setattr(made, f"cuda{name}", lambda *_: 0)
    found: ModuleType = made
    return found


def nvtx() -> SimpleNamespace:
    names = ["rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd"]
    return SimpleNamespace(**{name: lambda *_: 0 for name in names})


def finish(torch: Any) -> None:
    """Answers that are no functions of torch._C."""
    torch.version.cuda = torch.version.cuda or CUDA
    count = torch._C._cuda_getDeviceCount
    torch.cuda._device_count_nvml = torch.cuda._raw_device_count_nvml = count
    torch.cuda._get_nvml_device_index = lambda device: torch.cuda._utils._get_device_index(device, optional=True)
    for name in ("utilization", "temperature", "power_draw", "clock_rate"):
        setattr(torch.cuda, name, named_function(name, lambda device=None: 0))
    torch.cuda.nccl.is_available = lambda _tensors: False  # Sums over GPUs are then copies and additions.
    storage = torch.UntypedStorage
    make, resize = storage.__new__, storage.resize_

    def new_storage(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)
        size = args[0] if args and isinstance(args[0], int) else len(args[0]) if args else kwargs.get("size", 0)
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resize_storage(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        refused(library().resize(self._cdata, size))
        return self

    storage.__new__, storage.resize_ = new_storage, resize_storage
