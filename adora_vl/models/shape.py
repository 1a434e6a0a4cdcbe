"""The sizes of a model that memory depends on, from its config; no weight is loaded."""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.integrations import deepspeed

from adora_vl.models.families import (
    COMPONENTS,
    LANGUAGE_MODEL,
    Family,
    component_of,
    family_of,
    freeze,
    seeing_families,
)
from adora_vl.models.four_bit import in_four_bit
from adora_vl.models.load import auto_class, load_config
from adora_vl.utils import compat
from adora_vl.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

# the public config.json of the models in our recipes, for planning offline
SHAPES = Path(__file__).with_name("shapes")

# Of a pass of a frozen vision tower: enough to keep a GPU busy. All images of a generation at once
# took 14 GiB (128 rollouts with an image of 1,280 tokens each, for the 7B model).
PATCHES_A_PASS = 16_000


@dataclass(frozen=True)
class Tower:
    """One stack of transformer blocks. In the vision tower a token is a patch."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    swiglu: bool = True  # with RMS norms; else two products around a GELU, with layer norms
    head_norms: bool = False  # queries and keys are normalised head by head


@dataclass(frozen=True)
class ModelShape:
    """Numbers of parameters by component, and the sizes of the two towers.

    `vision` is None for a text-only model.
    """

    parameters: dict[str, int]
    trainable: dict[str, int]
    text: Tower
    vocabulary: int
    tied: bool
    weight_bytes: int  # per parameter, in the model's own dtype
    # parameters of the largest tensor, which is gathered whole while weights are synced
    largest_tensor: int
    head_is_trained: bool
    adapters: bool = False
    adapted: int = 0  # values per token that the adapted projections of a decoder layer read
    four_bit: int = 0  # parameters of frozen layers in 4 bits
    four_bit_bytes: float = 0.0  # of such a parameter, with its share of the scales
    vision: Tower | None = None
    patch: int = 14  # pixels of a patch's side
    merge: int = 2  # patches of an image token's side
    deepstack: int = 0  # layers of the language model behind which vision features enter once more
    # float32 values of a patch in `pixel_values`: 3 channels x 2 frames x 14 x 14
    patch_values: int = 1176
    frames: int = 2  # of a patch; an image has one, which is repeated

    @property
    def total(self) -> int:
        """The number of parameters."""
        return sum(self.parameters.values())

    @property
    def trained(self) -> int:
        """The number of parameters that are trained."""
        return sum(self.trainable.values())

    def base_bytes(self, parameter_bytes: int) -> int:
        """Return bytes of the base, without an adapter's parameters.

        `parameter_bytes`: the bytes of one parameter.

        Parameters in 4 bits take `four_bit_bytes` instead.
        """
        base = self.total - (self.trained if self.adapters else 0)
        four_bit_total = int(self.four_bit * self.four_bit_bytes)
        return (base - self.four_bit) * parameter_bytes + four_bit_total

    @property
    def image_token_pixels(self) -> int:
        """The number of pixels that one image token covers."""
        return (self.patch * self.merge) ** 2


def config_for_planning(
    name: str, revision: str | None = None
) -> tuple[PretrainedConfig, str | None]:
    """Return the config of a model folder or hub id, and a note if it is a shipped one.

    Raises `UserError` as `load_config` does, where no config of that name ships with this package.
    """
    try:
        return load_config(name, revision), None
    except UserError:
        shipped = SHAPES / name.rpartition("/")[2]
        if Path(name).is_dir() or not (shipped / "config.json").is_file():
            raise
        config = load_config(str(shipped))
        return config, f"the config of {name} is the one that ships here; the hub was not reached"


def describe(
    config: PretrainedConfig,
    *,
    dtype: str | None = None,
    frozen: Sequence[str] = (),
    peft_config: "PeftConfig" = None,
    four_bit_bytes: float = 0.0,
) -> ModelShape:
    """Return the shape of a policy as it will be trained.

    The modules are built on torch's meta device, so that names and numbers are the real ones and
    nothing is allocated. A family that is not in the table has no vision tower here: all of its
    parameters are in the language model. `frozen`: components that are not trained. `peft_config`:
    of LoRA. `four_bit_bytes`: bytes of a parameter in 4 bits, 0 where no layer is in 4 bits.
    """
    with compat.SHARDED_BUILD.replaced_by(None, on=deepspeed), torch.device("meta"):
        model = auto_class(config).from_config(config)
    four_bit_parameters = 0
    if four_bit_bytes:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and in_four_bit(name):
                four_bit_parameters += layer.weight.numel()
    if peft_config is not None:
        from peft import get_peft_model

        _check_names(model, peft_config)
        with torch.device("meta"):  # PEFT writes into the config that it gets
            model = get_peft_model(model, deepcopy(peft_config), autocast_adapter_dtype=False)
        refuse_embedding_adapters(model)
    freeze(model, frozen)
    parameters_by_component = dict.fromkeys(COMPONENTS, 0)
    trained_by_component = dict.fromkeys(COMPONENTS, 0)
    for name, parameter in model.named_parameters():
        component = component_of(name)
        parameters_by_component[component] += parameter.numel()
        if parameter.requires_grad:
            trained_by_component[component] += parameter.numel()
    head = model.get_output_embeddings().weight
    # All decoder layers are alike, so the first one stands for each.
    adapted_values = 0
    for name, module in model.named_modules():
        is_in_first_layer = ".layers.0." in name and "visual" not in name
        if is_in_first_layer and hasattr(module, "lora_A"):
            adapted_values += module.in_features
    family = family_of(config)
    vision = getattr(config, "vision_config", None)  # whose fields are known where the family is
    return ModelShape(
        parameters=parameters_by_component,
        trainable=trained_by_component,
        text=_text_tower(config.get_text_config(), family),
        vocabulary=config.get_text_config().vocab_size,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        weight_bytes=_dtype(dtype, config).itemsize,
        largest_tensor=max(p.numel() for p in model.parameters()),
        head_is_trained=bool(head.requires_grad),
        adapters=peft_config is not None,
        four_bit=four_bit_parameters,
        four_bit_bytes=four_bit_bytes,
        adapted=adapted_values,
        **({} if family is None or vision is None else _vision_fields(vision, family)),
    )


def language_layers(config: PretrainedConfig) -> list[str]:
    """Return the names of the language model's linear layers, without the output embedding.

    Each name once, as `q_proj`, in the order of the alphabet. The modules are built without memory.
    """
    with compat.SHARDED_BUILD.replaced_by(None, on=deepspeed), torch.device("meta"):
        model = auto_class(config).from_config(config)
    head = model.get_output_embeddings()
    names = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and component_of(f"{name}.weight") == LANGUAGE_MODEL
    ]
    return sorted(set(names))


def layers_pattern(names: Sequence[str]) -> str:
    """Return the regular expression for layers of these names outside of a vision tower.

    Some of the names also occur in the tower's MLP. PEFT matches it against whole names.
    """
    towers = "|".join(sorted({re.escape(vision.tower) for vision in seeing_families().values()}))
    return rf"(?!.*({towers})).*\.({'|'.join(names)})"


def _check_names(model: "PreTrainedModel", peft_config: "PeftConfig") -> None:
    """Raise `UserError` for a name in LoRA's lists that no module has.

    PEFT passes over it where another one fits.
    """
    names = [name for name, _ in model.named_modules()]
    for key, modules in (
        ("lora_target_modules", peft_config.target_modules),
        ("lora_modules_to_save", peft_config.modules_to_save),
    ):
        if not isinstance(modules, list | tuple | set):
            continue
        for module in sorted(modules):
            if not any(name == module or name.endswith(f".{module}") for name in names):
                close = did_you_mean(module, {name.rpartition(".")[2] for name in names})
                raise UserError(f"{key}: {module!r} is no module of this model{close}")


def refuse_embedding_adapters(model: "PeftModel") -> None:
    """Raise `UserError` for a `PeftModel` whose embeddings have an adapter that would be lost."""
    refuse_tied_adapters(model)
    refuse_head_adapters(model)


def refuse_head_adapters(model: "PeftModel") -> None:
    """Raise `UserError` for a `PeftModel` with an adapter on its output embedding.

    TRL multiplies the hidden states by the weight of that module alone, so the adapter would never
    be trained.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    head = base.get_output_embeddings()
    if not isinstance(head, BaseTunerLayer):
        return
    path = next(path for path, module in base.named_modules() if module is head)
    name = path.rpartition(".")[2]
    raise UserError(
        f"lora_target_modules: {name!r} would never be trained, because log-probabilities are "
        "computed from its weight without an adapter; leave it out"
    )


def refuse_tied_adapters(model: "PeftModel") -> None:
    """Raise `UserError` for a `PeftModel` in which an adapter changes one of two tied embeddings.

    vLLM and a saved model have one matrix for both uses, so that the adapter could be merged into
    neither: the engine would sample from another model than the one that learns.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    if not getattr(base.config, "tie_word_embeddings", False):
        return
    for embedding in (base.get_input_embeddings(), base.get_output_embeddings()):
        if isinstance(embedding, BaseTunerLayer | ModulesToSaveWrapper):
            path = next(path for path, module in base.named_modules() if module is embedding)
            name = path.rpartition(".")[2]
            key = "lora_modules_to_save"
            if isinstance(embedding, BaseTunerLayer):
                key = "lora_target_modules"
            shares = (
                f"{key}: {name!r} shares its weight with the other embedding "
                "(tie_word_embeddings: true)"
            )
            no_way = "so what it learns can be merged neither for the engine nor for a saved model"
            raise UserError(f"{shares}, {no_way}; leave it out")


def is_dtype(name: str) -> bool:
    """Return whether torch or Transformers has a dtype of this name."""
    torch_attribute = getattr(torch, name.removeprefix("torch."), None)
    return name == "auto" or isinstance(torch_attribute, torch.dtype)


def _dtype(name: str | None, config: PretrainedConfig) -> torch.dtype:
    """Return the dtype of this name.

    `auto` and None mean the dtype in the model's config, as in Transformers 5.
    """
    named = config.dtype if name in (None, "auto") else name
    dtype = getattr(torch, str(named or "float32").removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"dtype: {name!r} is no dtype of torch; use bfloat16, float16, float32 or auto"
        )
    return dtype


def _text_tower(config: PretrainedConfig, family: Family | None) -> Tower:
    """Return the sizes of the language model's layers."""
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return Tower(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=head_size,
        mlp_width=config.intermediate_size,
        head_norms=family is not None and family.head_norms,
    )


def _vision_fields(config: PretrainedConfig, family: Family) -> dict[str, Any]:
    """Return the fields of a shape that describe the vision tower.

    In Qwen2-VL `hidden_size` is the width of the tower's output, and `embed_dim` that of the tower.
    """
    width = getattr(config, "embed_dim", None) or config.hidden_size
    tower = Tower(
        layers=config.depth,
        width=width,
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_size=width // config.num_heads,
        mlp_width=getattr(config, "intermediate_size", None) or int(width * config.mlp_ratio),
        swiglu=family.vision is None or family.vision.swiglu,
    )
    return {
        "vision": tower,
        "patch": config.patch_size,
        "merge": config.spatial_merge_size,
        "deepstack": len(getattr(config, "deepstack_visual_indexes", ())),
        "frames": config.temporal_patch_size,
        "patch_values": getattr(config, "in_channels", 3)
        * config.temporal_patch_size
        * config.patch_size**2,
    }
