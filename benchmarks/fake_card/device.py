"""Makes torch's CPU build believe that the machine has one CUDA card. Import this before torch.

A CPU build has no device guard and no hooks for CUDA, without which autograd ends the process. A
C++ library of a few lines brings both. The machine's own compiler builds it once, in seconds.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

assert "torch" not in sys.modules, "benchmarks.fake_card.device has to be imported before torch"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

MEMORY = 80 * 2**30  # bytes of the card
_SOURCE = r"""
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device card(DeviceType::CUDA, 0);
static const Stream stream(Stream::DEFAULT, card);
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return card; }
  Device getDevice() const override { return card; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
struct Hooks : CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
  void deviceSynchronize(DeviceIndex) const override {}
};
// In place of libtorch_cpu's own functions, which know since they were compiled that there is no accelerator.
namespace detail { const CUDAHooksInterface& getCUDAHooks() { static Hooks hooks; return hooks; } }
namespace accelerator { std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; } }
}
"""


def _load_library() -> None:
    """Load the library into the process; build it where no earlier process has."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    torch_folder = Path(spec.submodule_search_locations[0])
    # A library is of one source and one build of torch.
    version = (torch_folder / "version.py").read_text()
    name = hashlib.sha256(f"{_SOURCE}{torch_folder}{version}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"adora_fake_card_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    if not library.exists():
        _build_library(library, torch_folder)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _build_library(library: Path, torch_folder: Path) -> None:
    """Compile the library. The file appears complete, also where several processes build it."""
    source = library.with_suffix(".cpp")
    source.write_text(_SOURCE)
    unfinished = library.with_suffix(f".{os.getpid()}.part")
    compiler = os.environ.get("CXX", "c++")
    options = ["-shared", "-fPIC", "-std=c++20", "-O1"]
    folders = [f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
    libraries = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run(
        [compiler, *options, *folders, str(source), "-o", str(unfinished), *libraries], check=True
    )
    unfinished.replace(library)


_load_library()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.nn.attention.bias import CausalBias  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

CARD = torch.device("cuda", 0)


# What functions of `torch.cuda` return.
_CAPABILITY = (9, 0)
_PROPERTIES = types.SimpleNamespace(
    name="simulated card",
    total_memory=MEMORY,
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    multi_processor_count=132,
    shared_memory_per_block=49152,
    warp_size=32,
    is_integrated=False,
    uuid="0",
    gcnArchName="",
    regs_per_multiprocessor=65536,
)
_RNG_STATE = torch.zeros(16, dtype=torch.uint8)
_RESULT_BY_FUNCTION: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "is_initialized": True,
    "_is_in_bad_fork": False,
    "get_device_capability": _CAPABILITY,
    "get_device_properties": _PROPERTIES,
    "get_device_name": _PROPERTIES.name,
    "is_bf16_supported": True,
    "get_rng_state": _RNG_STATE,
    "get_rng_state_all": [_RNG_STATE],
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
    "get_arch_list": ["sm_90"],
    "is_current_stream_capturing": False,
    "memory_stats": {},  # the simulated allocator keeps no cache
}
# Functions of `torch.cuda` that do nothing here.
_SILENT_FUNCTIONS = (
    *("set_device", "_lazy_init", "init", "_lazy_call", "empty_cache", "ipc_collect"),
    *("manual_seed", "manual_seed_all", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("reset_peak_memory_stats", "set_sync_debug_mode"),
)
# What functions of `torch._C` return that a CPU build lacks; their names begin with `_cuda_` there.
_RESULT_BY_C_FUNCTION: dict[str, Any] = {
    "getDevice": 0,
    "setDevice": None,
    "getDeviceCount": 1,
    "isCurrentStreamCapturing": False,
    "synchronize": None,
    "clearCublasWorkspaces": None,
    "getCurrentRawStream": 0,
}


def _never_called(*args: object, **kwargs: object) -> None:
    raise AssertionError("an operation on the card was not handled as a fake one")


def _returning(value: Any) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns this value."""
    return lambda *args, **kwargs: value


def answer_as_a_card(
    on_wait: Callable[[str], None], memory_in_use: Callable[[], tuple[int, int]]
) -> None:
    """Make `torch.cuda` speak of one card for the rest of the process.

    Args:
        on_wait: called where the host waits for the whole card.
        memory_in_use: returns the bytes that are held now, and that were held at most.
    """
    cuda: Any = torch.cuda
    for name, value in _RESULT_BY_FUNCTION.items():
        setattr(cuda, name, _returning(value))
        # `torch.random` calls some of them by the module in which they are defined.
        if hasattr(cuda.random, name):
            setattr(cuda.random, name, _returning(value))
    for name in _SILENT_FUNCTIONS:
        setattr(cuda, name, _returning(None))
    cuda.memory_allocated = lambda *args: memory_in_use()[0]
    cuda.memory_reserved = cuda.memory_allocated
    cuda.max_memory_allocated = lambda *args: memory_in_use()[1]
    cuda.max_memory_reserved = cuda.max_memory_allocated
    cuda.mem_get_info = lambda *args: (MEMORY - memory_in_use()[0], MEMORY)
    cuda.synchronize = lambda *args: on_wait("torch.cuda.synchronize")
    for name, value in _RESULT_BY_C_FUNCTION.items():
        if not hasattr(torch._C, f"_cuda_{name}"):
            setattr(torch._C, f"_cuda_{name}", _returning(value))
    torch.version.cuda = torch.version.cuda or "13.0"
    torch._C._set_only_lift_cpu_tensors(True)
    torch.autograd.set_multithreading_enabled(False)
    _refuse_unhandled_operations()
    _mend_what_fakes_lack()


_KERNELS = torch.library.Library("aten", "IMPL")  # registrations last as long as this


def _refuse_unhandled_operations() -> None:
    """Register a kernel that raises for operations which would be several ones on the card.

    These operations have kernels of their own on a card. Without a registration torch would split
    them, with memory between the parts that a card does not use.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        is_split = has_kernel(name, "CompositeImplicitAutograd")
        if name.startswith("aten::") and has_kernel(name, "CPU") and is_split:
            _KERNELS.impl(name.removeprefix("aten::"), _never_called, "CUDA")


def _mend_what_fakes_lack() -> None:
    """Teach fake tensors what torch does with real ones and fake ones lack."""
    import torch.cuda.amp.common as amp

    amp.amp_definitely_not_available = lambda: False
    swap = torch.utils.swap_tensors

    def swap_or_replace(tensor: Tensor, replacement: Tensor) -> None:
        """Swap two real tensors; let a fake one take the data of the other."""
        # `Module.to` swaps tensors. Fakes have weak references, with which a swap is refused.
        if not isinstance(tensor, FakeTensor):
            swap(tensor, replacement)
        elif (tensor.dtype, tensor.device) != (replacement.dtype, replacement.device):
            tensor.data = replacement.detach()

    def new_bias(cls: type[CausalBias], *args: object, **kwargs: object) -> Tensor:
        # The constructor does not run inside a mode.
        with _disable_current_modes():
            return torch.Tensor.__new__(cls)

    def backward(
        tensor: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        # Torch's own method looks for a torch function first, and so for a mode. A mode is off
        # inside its own handler, where checkpointing computes layers again.
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    torch.utils.swap_tensors = swap_or_replace
    CausalBias.__new__ = new_bias  # type: ignore[method-assign,assignment]
    torch.Tensor.backward = backward  # type: ignore[method-assign]
