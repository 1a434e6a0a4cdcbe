"""A base in 4 bits (bitsandbytes): when a run has one, and what it does not go with.

Trainer and engine read one copy, so that both compute with the same weights.
"""

import hashlib
import sys
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig
from trl import ModelConfig

from adora_vl.models.load import load_model, load_processor, model_hash
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import cache_folder, replacing_folder
from adora_vl.utils.versions import installed

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel
    from trl import GRPOConfig

# What stays whole. Transformers goes by the beginning of a name, vLLM's plugin by names of its own.
WHOLE = ("lm_head", "model.visual", "visual")
_PACKAGES = ("bitsandbytes", "vllm-bnb-plugin")


def is_four_bit(config: PretrainedConfig) -> bool:
    """Return whether the model was saved in 4 bits."""
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    is_bitsandbytes = quantization.get("quant_method") == "bitsandbytes"
    return is_bitsandbytes and bool(quantization.get("load_in_4bit"))


def check_four_bit(
    model: ModelConfig,
    run: "GRPOConfig",
    config: PretrainedConfig,
    peft_config: "PeftConfig",
    *,
    stage: int | None,
    runs_here: bool,
) -> bool:
    """Return whether the base is in 4 bits.

    Args:
        model: the keys of the model.
        run: the run's config.
        config: the model's own.
        peft_config: that of the adapter; None without one.
        stage: DeepSpeed's ZeRO stage; None without DeepSpeed.
        runs_here: whether this machine will run it, so that packages must be installed.

    Raises `UserError` for another quantisation, and for what does not go with 4 bits.
    """
    is_saved_so = is_four_bit(config)
    if model.load_in_8bit:
        raise UserError(
            "load_in_8bit: true is not supported; set load_in_4bit: true, or leave it out"
        )
    if getattr(config, "quantization_config", None) and not is_saved_so:
        raise UserError(
            f"model_name_or_path: {model.model_name_or_path!r} is quantised in another way than "
            "bitsandbytes' 4 bits; name the model that it was made of"
        )
    if not model.load_in_4bit and not is_saved_so:
        return False
    key = "load_in_4bit: true" if model.load_in_4bit else "model_name_or_path: a base in 4 bits"
    if peft_config is None:
        raise UserError(f"{key} trains an adapter alone; set use_peft: true")
    obstacle = _obstacle_to_four_bit(model, run, peft_config, stage)
    if obstacle is not None:
        raise UserError(f"{key} does not go with {obstacle}")
    packages = _PACKAGES if run.use_vllm else _PACKAGES[:1]
    for package in packages:
        if runs_here and not installed(package):
            raise UserError(
                f"{key}, but {package} is not installed; install the extra adora-vl[4bit]"
            )
    return True


def _obstacle_to_four_bit(
    model: ModelConfig, run: "GRPOConfig", peft_config: "PeftConfig", stage: int | None
) -> str | None:
    """Return the first setting that a base in 4 bits does not go with, and its remedy.

    The arguments are those of `check_four_bit`. None where everything goes with it.
    """
    saved_modules = getattr(peft_config, "modules_to_save", None)
    adapter_kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    # (whether the obstacle is there, what it is and what to do)
    for is_there, obstacle in (
        (
            model.dtype != "bfloat16",
            f"dtype: {model.dtype}, as the engine computes in bfloat16; set dtype: bfloat16",
        ),
        (run.fp16, "fp16: true; set bf16: true"),
        (
            model.bnb_4bit_quant_storage not in (None, "uint8"),
            f"bnb_4bit_quant_storage: {model.bnb_4bit_quant_storage}, which the engine "
            "does not read; leave it out",
        ),
        (stage is not None, "DeepSpeed; start with configs/accelerate/gpu1.yaml"),
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
            run.use_vllm and run.vllm_mode == "server" and run.adora_weight_transfer == "nccl",
            "adora_weight_transfer: nccl; set it to file",
        ),
        (
            run.use_vllm and run.vllm_tensor_parallel_size > 1,
            "vllm_tensor_parallel_size above 1; set it to 1",
        ),
        (
            run.use_vllm and run.adora_vllm_dtype not in ("auto", "bfloat16"),
            f"adora_vllm_dtype: {run.adora_vllm_dtype}; set it to auto",
        ),
    ):
        if is_there:
            return obstacle
    return None


def in_four_bit(layer: str) -> bool:
    """Return whether the linear layer of this name is among those that 4 bits are for."""
    return not layer.startswith(WHOLE)


def bytes_of(nested: bool) -> float:
    """Return the bytes of a parameter in 4 bits, with its share of the scales.

    A parameter takes half a byte, and 64 of them share a float32 scale. `nested`: the scales take
    a byte, and 256 of them share a float32.
    """
    scale_bytes = 1 / 64 + 4 / (64 * 256) if nested else 4 / 64
    return 0.5 + scale_bytes


def four_bit_folder(name: str, revision: str | None, model: ModelConfig) -> str:
    """Return the folder of the base `name` in 4 bits, which is made in the cache where it is missing.

    One process makes it, once; the others wait for it. `model`: the keys that say how.
    """
    nested = model.use_bnb_nested_quant
    # whatever the weights in 4 bits depend on
    key_parts = (
        model_hash(name, revision) or f"{name}@{revision}",
        model.bnb_4bit_quant_type,
        nested,
        *WHOLE,
    )
    key = hashlib.sha256(str(key_parts).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{model.bnb_4bit_quant_type}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model.bnb_4bit_quant_type,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=nested,
        llm_int8_skip_modules=list(WHOLE),
    )
    init = {
        "revision": revision,
        "device_map": None,
        "trust_remote_code": False,
        "dtype": torch.bfloat16,
    }
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not (folder / "config.json").is_file():
            print(
                f"{name} is turned into 4 bits, once, for trainer and engine: {folder}",
                file=sys.stderr,
                flush=True,
            )
            with replacing_folder(folder) as staged:
                quantized_model = load_model(name, {**init, "quantization_config": quantization})
                quantized_model.save_pretrained(staged)
                del quantized_model  # before the cache is emptied below
                load_processor(name, revision).save_pretrained(staged)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return str(folder)


def keep_gradients(model: "PreTrainedModel") -> None:
    """Keep bitsandbytes from repacking layers on a CPU with AVX-512 in bfloat16.

    It repacks a layer in its first pass without gradients, and no gradient comes through it from
    then on; widths that are no multiple of 64 fail. Ours leaves the layers as they are.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


class FrozenBase:
    """What is not trained of the policy.

    It lies in pinned memory of the host while the engine is awake, so that the card holds one copy
    of the base at a time. On a CPU nothing moves.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the frozen parameters, which stay on the card until `leave`."""
        self.frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self.device = next(model.parameters()).device
        self._host_copies: list[torch.Tensor] = []
        self.away = False  # whether the frozen weights are on the host
        self.moves = 0  # to the host and back

    def leave(self) -> None:
        """Give the card's memory back.

        The copy on the host is made once: what is frozen does not change.
        """
        if self.away:
            return
        if self.device.type != "cpu":
            if not self._host_copies:
                for parameter in self.frozen:
                    self._host_copies.append(parameter.data.to("cpu").pin_memory())
            for parameter, host_copy in zip(self.frozen, self._host_copies, strict=True):
                parameter.data = host_copy
            torch.cuda.empty_cache()
        self.away = True
        self.moves += 1

    def come_back(self) -> None:
        """Move the frozen weights back to the card, before the policy makes a pass."""
        if not self.away:
            return
        if self.device.type != "cpu":
            for parameter in self.frozen:
                parameter.data = parameter.data.to(self.device, non_blocking=True)
        self.away = False
        self.moves += 1
