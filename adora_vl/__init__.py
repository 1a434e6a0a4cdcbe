"""adora_vl: GRPO for vision-language models on geometry, with ADORA's dynamic advantages.

From Python: `from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer`, in place of TRL's
`GRPOConfig` and `GRPOTrainer`. `load_problems` loads what they train on.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from adora_vl.utils.interrupts import install_interrupt_hook

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.problems import load_problems
    from adora_vl.trainer import AdoraGRPOTrainer

__version__ = "0.1.0"
__all__ = ["AdoraGRPOConfig", "AdoraGRPOTrainer", "__version__", "load_problems"]

# here, since Python imports this file before anything else of ours
install_interrupt_hook()
# On a CPU with AVX-512 in bfloat16 it warns at every import that a kernel from the hub, which is
# not used, is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
_MODULE_BY_NAME = {
    "AdoraGRPOConfig": "adora_vl.config",
    "AdoraGRPOTrainer": "adora_vl.trainer",
    "load_problems": "adora_vl.problems",
}


def __getattr__(name: str) -> Any:
    """The names are imported when they are asked for: torch, TRL and vLLM take seconds, which
    grading need not wait for.
    """
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'adora_vl' has no attribute {name!r}")
    from adora_vl.utils.launch import (
        prepare_engine_environment,
        use_expandable_segments,
        without_garbage_collection,
    )

    prepare_engine_environment()  # before the import: vLLM reads its environment there
    use_expandable_segments()
    with without_garbage_collection():
        module = import_module(_MODULE_BY_NAME[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_BY_NAME})
