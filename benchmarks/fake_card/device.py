"""Torch's CPU build takes `cuda` for a device of one card.

Import this before torch.

The build has no device guard and no hooks for CUDA, without which autograd ends the process. A
library of a few lines brings both; the machine's own C++ compiler makes it once in seconds.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

assert "torch" not in sys.modules, "benchmarks.fake_card.device has to be imported before torch"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

MEMORY = 80 * 2**30
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
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    torch_folder = Path(spec.submodule_search_locations[0])
    name = hashlib.sha256(
        f"{_SOURCE}{torch_folder}{(torch_folder / 'version.py').read_text()}".encode()
    ).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"adora_fake_card_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    if not library.exists():
        source = folder / f"{name}.cpp"
        part = folder / f"{name}.{os.getpid()}.part"
        source.write_text(_SOURCE)
        options = [
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-O1",
            f"-I{torch_folder}/include",
            f"-L{torch_folder}/lib",
        ]
        links = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
        subprocess.run(
            [os.environ.get("CXX", "c++"), *options, str(source), "-o", str(part), *links],
            check=True,
        )
        part.replace(library)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


_load_library()

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.nn.attention.bias import CausalBias  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

CARD = torch.device("cuda", 0)


def _never_called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("an operation on the card was not handled as a fake one")


def answer_as_a_card(on_wait: Callable[[str], None], used: Callable[[], tuple[int, int]]) -> None:
    """Make `torch.cuda` speak of one card for the rest of the process.

    `on_wait`: called where the host waits for the whole card. `used`: the bytes held now, and at
    most.
    """
    cuda: Any = torch.cuda
    capability = (9, 0)

    def nothing(*args, **kwargs):
        return None

    properties = types.SimpleNamespace(
        name="simulated card",
        total_memory=MEMORY,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        shared_memory_per_block=49152,
        warp_size=32,
        is_integrated=False,
        uuid="0",
        gcnArchName="",
        regs_per_multiprocessor=65536,
    )
    noise = torch.zeros(16, dtype=torch.uint8)
    same: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "get_rng_state": noise,
        "get_rng_state_all": [noise],
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_arch_list": ["sm_90"],
        "is_current_stream_capturing": False,
    }
    silent = (
        "set_device _lazy_init init _lazy_call empty_cache manual_seed manual_seed_all seed_all "
        "ipc_collect"
    )
    silent += " reset_peak_memory_stats set_rng_state set_rng_state_all set_sync_debug_mode"
    for name, value in same.items():
        if hasattr(cuda.random, name):
            setattr(cuda.random, name, lambda *args, _value=value, **kwargs: _value)
        setattr(cuda, name, lambda *args, _value=value, **kwargs: _value)
    for name in silent.split():
        setattr(cuda, name, nothing)
    cuda.mem_get_info = lambda *args: (MEMORY - used()[0], MEMORY)
    for name, index in {
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 1,
        "max_memory_reserved": 1,
    }.items():
        setattr(cuda, name, lambda *args, _index=index: used()[_index])
    cuda.memory_stats = lambda *args: {}  # there is no cache
    cuda.synchronize = lambda *args: on_wait("torch.cuda.synchronize")
    inner = {
        "getDevice": 0,
        "setDevice": None,
        "getDeviceCount": 1,
        "isCurrentStreamCapturing": False,
        "synchronize": None,
    }
    for name, value in {**inner, "clearCublasWorkspaces": None, "getCurrentRawStream": 0}.items():
        if not hasattr(torch._C, f"_cuda_{name}"):
            setattr(torch._C, f"_cuda_{name}", lambda *args, _value=value: _value)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch._C._set_only_lift_cpu_tensors(True)
    torch.autograd.set_multithreading_enabled(False)
    _mend_what_fakes_lack()


_KERNELS = torch.library.Library("aten", "IMPL")  # registrations last as long as this


def _mend_what_fakes_lack() -> None:
    """Teach fake tensors what torch does with real ones and fake ones lack."""
    import torch.cuda.amp.common as amp

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        # Kernels of their own on a card, without which they would be several operations with memory
        # between them
        if (
            name.startswith("aten::")
            and has(name, "CPU")
            and has(name, "CompositeImplicitAutograd")
        ):
            _KERNELS.impl(name.removeprefix("aten::"), _never_called, "CUDA")

    amp.amp_definitely_not_available = lambda: False
    swap = torch.utils.swap_tensors

    def swapped(
        tensor: Any, replacement: Any
    ) -> None:  # `Module.to`: fakes have weak references, which a swap refuses
        if not isinstance(tensor, FakeTensor):
            swap(tensor, replacement)
        elif (tensor.dtype, tensor.device) != (replacement.dtype, replacement.device):
            tensor.data = replacement.detach()

    def bias(
        cls: Any, *args: Any, **kwargs: Any
    ) -> Any:  # its constructor does not run below a mode
        with _disable_current_modes():
            return torch.Tensor.__new__(cls)

    def backward(
        tensor: Any,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        # No torch function: a mode is off inside its own handler, and checkpointing computes layers
        # again there.
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    torch.utils.swap_tensors = swapped
    CausalBias.__new__ = bias  # type: ignore[method-assign]
    torch.Tensor.backward = backward  # type: ignore[method-assign]
