"""A base model in 4 bits (bitsandbytes): when a run has one, and which settings it excludes.

Trainer and engine read the same quantised files, so that both compute with the same weights.
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig
from trl import ModelConfig

from adora_vl.models.load import load_model, load_processor, model_hash
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import cache_folder, replacing_folder
from adora_vl.utils.versions import installed_version

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel
    from trl import GRPOConfig

# Modules that are not quantised: each whose name begins with one of these. The vision tower is here
# twice, since vLLM's plugin calls it `visual` and Transformers `model.visual`.
UNQUANTISED_MODULES = ("lm_head", "model.visual", "visual")


def is_four_bit(config: PretrainedConfig) -> bool:
    """Return whether the model was saved in bitsandbytes' 4 bits."""
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    is_bitsandbytes = quantization.get("quant_method") == "bitsandbytes"
    return is_bitsandbytes and bool(quantization.get("load_in_4bit"))


def check_four_bit(
    model: ModelConfig,
    run_config: "GRPOConfig",
    config: PretrainedConfig,
    peft_config: "PeftConfig",
    *,
    zero_stage: int | None,
    runs_here: bool,
) -> bool:
    """Return whether the run trains on a base in 4 bits, and check that it can.

    Args:
        model: the keys of the model.
        run_config: the config of the run.
        config: the config of the model.
        peft_config: the config of the adapter; None without an adapter.
        zero_stage: DeepSpeed's ZeRO stage; None without DeepSpeed.
        runs_here: whether this machine will run it, so that packages must be installed.

    Raises:
        UserError: for another quantisation, for a setting that a base in 4 bits excludes, and for
            a package that is not installed.
    """
    is_saved_in_four_bit = is_four_bit(config)
    if model.load_in_8bit:
        raise UserError(
            "load_in_8bit: true is not supported; set load_in_4bit: true, or leave it out"
        )
    if getattr(config, "quantization_config", None) and not is_saved_in_four_bit:
        raise UserError(
            f"model_name_or_path: {model.model_name_or_path!r} is quantised in another way than "
            "bitsandbytes' 4 bits; name the model that it was made of"
        )
    if not model.load_in_4bit and not is_saved_in_four_bit:
        return False
    key = "load_in_4bit: true" if model.load_in_4bit else "model_name_or_path: a base in 4 bits"
    if peft_config is None:
        raise UserError(f"{key} trains an adapter alone; set use_peft: true")
    obstacle = _obstacle_to_four_bit(
        model, run_config=run_config, peft_config=peft_config, zero_stage=zero_stage
    )
    if obstacle is not None:
        raise UserError(f"{key} does not go with {obstacle}")
    packages = ["bitsandbytes"]
    if run_config.use_vllm:
        packages.append("vllm-bnb-plugin")
    for package in packages:
        if runs_here and not installed_version(package):
            raise UserError(
                f"{key}, but {package} is not installed; install the extra adora-vl[4bit]"
            )
    return True


def _obstacle_to_four_bit(
    model: ModelConfig, run_config: "GRPOConfig", peft_config: "PeftConfig", zero_stage: int | None
) -> str | None:
    """Return the first setting that a base in 4 bits excludes, with its remedy; None for none.

    For example, `fp16: true; set bf16: true`. The arguments are those of `check_four_bit`.
    """
    saved_modules = getattr(peft_config, "modules_to_save", None)
    adapter_kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    # Each pair: whether the run has this setting, and the setting with its remedy.
    for is_obstacle, obstacle in (
        (
            model.dtype != "bfloat16",
            f"dtype: {model.dtype}, as the engine computes in bfloat16; set dtype: bfloat16",
        ),
        (run_config.fp16, "fp16: true; set bf16: true"),
        (
            model.bnb_4bit_quant_storage not in (None, "uint8"),
            f"bnb_4bit_quant_storage: {model.bnb_4bit_quant_storage}, which the engine "
            "does not read; leave it out",
        ),
        (zero_stage is not None, "DeepSpeed; start with configs/accelerate/gpu1.yaml"),
        (adapter_kind != "LORA", f"an adapter of the kind {adapter_kind}; use LoRA"),
        (getattr(peft_config, "use_dora", None), "use_dora: true; leave it out"),
        (
            saved_modules,
            f"lora_modules_to_save: {saved_modules}; leave it out",
        ),
        (
            getattr(peft_config, "target_parameters", None),
            "lora_target_parameters; name lora_target_modules",
        ),
        (
            getattr(peft_config, "bias", "none") != "none",
            f"biases of the adapter ({peft_config.bias})",
        ),
        (
            run_config.use_vllm
            and run_config.vllm_mode == "server"
            and run_config.adora_weight_transfer == "nccl",
            "adora_weight_transfer: nccl; set it to file",
        ),
        (
            run_config.use_vllm and run_config.vllm_tensor_parallel_size > 1,
            "vllm_tensor_parallel_size above 1; set it to 1",
        ),
        (
            run_config.use_vllm and run_config.adora_vllm_dtype not in ("auto", "bfloat16"),
            f"adora_vllm_dtype: {run_config.adora_vllm_dtype}; set it to auto",
        ),
    ):
        if is_obstacle:
            return obstacle
    return None


def is_quantised_layer(layer: str) -> bool:
    """Return whether the linear layer of this name is quantised to 4 bits.

    Layers of the vision tower, and the output embedding, are not quantised.
    """
    return not layer.startswith(UNQUANTISED_MODULES)


def four_bit_parameter_bytes(has_nested_scales: bool) -> float:
    """Return the bytes of a parameter in 4 bits, with its share of the scales.

    It is half a byte, and the bytes of a scale divided among the parameters of a block: 0.5625, or
    about 0.516 with nested scales. `has_nested_scales`: whether the scales are
    quantised too (`use_bnb_nested_quant`).
    """
    parameters_per_scale = 64
    scale_bytes = 4.0  # a float32
    if has_nested_scales:
        scale_bytes = 1 + 4 / 256  # one byte, and 256 scales share a float32 of 4 bytes
    return 0.5 + scale_bytes / parameters_per_scale


def four_bit_folder(name: str, revision: str | None, model: ModelConfig) -> str:
    """Return the folder of a base in 4 bits, for trainer and engine; make it if it is missing.

    It is kept in the cache. One process makes it, and the others wait for it.

    Args:
        name: folder or hub id of the base in its own dtype.
        revision: of the hub id.
        model: the keys that say how it is quantised.
    """
    nested = model.use_bnb_nested_quant
    # The folder's name is a hash of everything that the weights in 4 bits depend on.
    key_parts = (
        model_hash(name, revision) or f"{name}@{revision}",
        model.bnb_4bit_quant_type,
        nested,
        *UNQUANTISED_MODULES,
    )
    key = hashlib.sha256(str(key_parts).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{model.bnb_4bit_quant_type}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model.bnb_4bit_quant_type,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=nested,
        llm_int8_skip_modules=list(UNQUANTISED_MODULES),
    )
    init_kwargs = {
        "revision": revision,
        "device_map": None,
        "trust_remote_code": False,
        "dtype": torch.bfloat16,
        "quantization_config": quantization,
    }
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not (folder / "config.json").is_file():
            print(
                f"{name} is turned into 4 bits, once, for trainer and engine: {folder}",
                file=sys.stderr,
                flush=True,
            )
            _write_four_bit(folder, name, init_kwargs)
    return str(folder)


def _write_four_bit(folder: Path, name: str, init_kwargs: Mapping[str, Any]) -> None:
    """Load a base in 4 bits, and save it with its processor into `folder`, whole or not at all."""
    with replacing_folder(folder) as new_folder:
        quantized_model = load_model(name, init_kwargs)
        quantized_model.save_pretrained(new_folder)
        del quantized_model  # so that the memory below can be given back
        load_processor(name, init_kwargs["revision"]).save_pretrained(new_folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prevent_repacking(model: "PreTrainedModel") -> None:
    """Keep bitsandbytes from repacking its layers on a CPU with AVX-512 in bfloat16.

    It would repack a layer in its first pass without gradients. From then on no gradient comes
    through the layer, and widths that are no multiple of 64 fail.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # a layer in 4 bits
            module.support_avx512bf16_for_cpu = False


class FrozenBase:
    """The frozen parameters of a policy, which move to host memory while the engine is awake.

    The engine has a copy of the base too. With these moves the GPU holds one copy at a time. On the
    host the parameters are in pinned memory. If the policy runs on a CPU, nothing moves.
    """

    def __init__(self, model: nn.Module) -> None:
        """Collect the frozen parameters, which stay on the GPU until `move_to_host`."""
        self.frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self.device = next(model.parameters()).device
        self._host_copies: list[torch.Tensor] = []  # made by the first `move_to_host`
        self.is_on_host = False

    def move_to_host(self) -> None:
        """Move the frozen parameters to pinned host memory, before the engine wakes up."""
        if self.is_on_host:
            return
        if self.device.type != "cpu":
            if not self._host_copies:  # once, since frozen parameters do not change
                for parameter in self.frozen:
                    self._host_copies.append(parameter.data.to("cpu").pin_memory())
            for parameter, host_copy in zip(self.frozen, self._host_copies, strict=True):
                parameter.data = host_copy
            torch.cuda.empty_cache()
        self.is_on_host = True

    def move_to_device(self) -> None:
        """Move the frozen parameters back to the GPU, before the policy makes a pass."""
        if not self.is_on_host:
            return
        if self.device.type != "cpu":
            for parameter in self.frozen:
                parameter.data = parameter.data.to(self.device, non_blocking=True)
        self.is_on_host = False
