"""Number formats that this machine cannot compute in."""

from __future__ import annotations

from typing import Any

from transformers.utils import is_torch_bf16_gpu_available, is_torch_cuda_available, is_torch_xla_available

from adora_vl.errors import UserError

_CPU_RECIPE = "configs/train/smoke_cpu.yaml is a recipe for a CPU (use_cpu: true, bf16: false)"


class NoGPUError(UserError):
    """The config needs a GPU and there is none. `key` is the key that needs it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: true needs a GPU, and there is none here; {_CPU_RECIPE}")
        self.key = key


def check_device(config: Any) -> None:
    """Raises `UserError`. Transformers refuses the same settings, but without naming a key or a remedy."""
    if config.use_cpu:
        return
    bf16 = bool(config.bf16) if config.bf16 is not None else not config.fp16  # as TRL fills it in
    if bf16 and not is_torch_bf16_gpu_available() and not is_torch_xla_available():
        if is_torch_cuda_available():
            raise UserError("bf16: true, but this GPU cannot compute in bfloat16; set bf16: false and fp16: true")
        raise NoGPUError("bf16")
    if config.fp16 and not is_torch_cuda_available():
        raise NoGPUError("fp16")
