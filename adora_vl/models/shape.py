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
    vision_by_model_type,
)
from adora_vl.models.four_bit import is_quantised_layer
from adora_vl.models.load import auto_class, load_config
from adora_vl.utils import compat
from adora_vl.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

# the public config.json of the models in our recipes, for planning offline
SHAPES_FOLDER = Path(__file__).with_name("shapes")

# The number of patches in one pass of a frozen vision tower. It is enough to keep a GPU busy. A
# pass with all images of a generation took 14 GiB (7B model, 128 rollouts, an image of 1,280 tokens
# each).
PATCHES_PER_PASS = 16_000


@dataclass(frozen=True)
class Tower:
    """The sizes of one stack of transformer blocks. In the vision tower a token is a patch."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    # True: an MLP with SwiGLU, and RMS norms. False: an MLP of two products around a GELU, and
    # layer norms.
    has_swiglu: bool = True
    has_head_norms: bool = False  # queries and keys are normalised head by head


@dataclass(frozen=True)
class ModelShape:
    """Numbers of parameters by component, and the sizes of the language model and vision tower.

    The components are `COMPONENTS`: vision tower, projector and language model.
    """

    parameter_count_by_component: dict[str, int]
    trained_count_by_component: dict[str, int]
    text: Tower
    vocabulary_size: int
    ties_embeddings: bool  # input and output embedding are one matrix
    bytes_per_weight: int  # in the model's own dtype
    # The number of parameters of the largest tensor, which is gathered whole in a weight sync.
    largest_tensor_parameters: int
    head_is_trained: bool
    has_adapters: bool = False
    # How many values per token the adapters of one decoder layer take as input.
    adapter_inputs_per_token: int = 0
    four_bit_parameters: int = 0  # the number of parameters in 4 bits, which are frozen
    # The bytes of a parameter in 4 bits, with its share of the scales.
    bytes_per_four_bit_parameter: float = 0.0
    vision: Tower | None = None  # None for a text-only model
    patch_size: int = 14  # a patch has 14 x 14 pixels
    merge_size: int = 2  # an image token has 2 x 2 patches
    # layers of the language model after which vision features are added once more
    deepstack_layers: int = 0
    # float32 values of a patch in `pixel_values`: 3 channels x 2 frames x 14 x 14
    patch_values: int = 1176
    frames_per_patch: int = 2  # the single frame of an image is repeated

    @property
    def total_parameters(self) -> int:
        """The number of parameters of all components, with those of adapters."""
        return sum(self.parameter_count_by_component.values())

    @property
    def trained_parameters(self) -> int:
        """The number of parameters that are trained."""
        return sum(self.trained_count_by_component.values())

    @property
    def tower_is_frozen(self) -> bool:
        """Whether neither the vision tower nor the projector is trained."""
        trained = self.trained_count_by_component
        return trained["vision_tower"] == 0 and trained["projector"] == 0

    def base_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes of the base model, without the parameters of adapters.

        For example, let the base have 1,000 parameters, 800 of them in 4 bits with 0.5625 bytes
        each. With 2 bytes for each of the others it has 200 * 2 + 450 = 850 bytes.

        `parameter_bytes`: the bytes of a parameter that is not in 4 bits.
        """
        base_parameters = self.total_parameters
        if self.has_adapters:  # then nothing but the adapters is trained
            base_parameters -= self.trained_parameters
        four_bit_total = int(self.four_bit_parameters * self.bytes_per_four_bit_parameter)
        return (base_parameters - self.four_bit_parameters) * parameter_bytes + four_bit_total

    @property
    def image_token_pixels(self) -> int:
        """The number of pixels that one image token covers, such as (14 * 2)**2 = 784."""
        return (self.patch_size * self.merge_size) ** 2


def config_for_planning(
    name: str, revision: str | None = None
) -> tuple[PretrainedConfig, str | None]:
    """Return the config of a model folder or hub id, and a note for the user or None.

    If the hub cannot be reached, the models of our recipes get the config that ships with this
    package, and the note says so. For any other model `UserError` is raised, as by `load_config`.
    """
    try:
        return load_config(name, revision), None
    except UserError:
        shipped_folder = SHAPES_FOLDER / name.rpartition("/")[2]
        if Path(name).is_dir() or not (shipped_folder / "config.json").is_file():
            raise
        config = load_config(str(shipped_folder))
        return config, f"the config of {name} is the one that ships here; the hub was not reached"


def model_shape(
    config: PretrainedConfig,
    *,
    dtype: str | None = None,
    frozen: Sequence[str] = (),
    peft_config: "PeftConfig" = None,
    bytes_per_four_bit_parameter: float = 0.0,
) -> ModelShape:
    """Return the sizes of a policy as it will be trained, without its weights.

    A family that is not in `FAMILIES` has no vision tower here: all of its parameters are in the
    language model.

    Args:
        config: the config of the model.
        dtype: the dtype of the weights; None for the one in `config`.
        frozen: components that are not trained.
        peft_config: the config of LoRA; None without adapters.
        bytes_per_four_bit_parameter: with its share of the scales; 0 where no layer is in 4 bits.
    """
    model = _build_without_memory(config)
    four_bit_parameters = _quantised_parameters(model) if bytes_per_four_bit_parameter else 0
    if peft_config is not None:
        model = _add_adapters(model, peft_config)
    freeze(model, frozen)
    head = model.get_output_embeddings().weight
    family = family_of(config)
    text_config = config.get_text_config()
    vision_shape_fields: dict[str, Any] = {}
    vision_config = getattr(config, "vision_config", None)
    if family is not None and vision_config is not None:
        vision_shape_fields = _vision_shape_fields(vision_config, family)
    return ModelShape(
        parameter_count_by_component=_parameter_count_by_component(model, trained_only=False),
        trained_count_by_component=_parameter_count_by_component(model, trained_only=True),
        text=_text_tower(text_config, family),
        vocabulary_size=text_config.vocab_size,
        ties_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        bytes_per_weight=_resolve_dtype(dtype, config).itemsize,
        largest_tensor_parameters=max(parameter.numel() for parameter in model.parameters()),
        head_is_trained=bool(head.requires_grad),
        has_adapters=peft_config is not None,
        four_bit_parameters=four_bit_parameters,
        bytes_per_four_bit_parameter=bytes_per_four_bit_parameter,
        adapter_inputs_per_token=_adapter_inputs_per_token(model),
        **vision_shape_fields,
    )


def _build_without_memory(config: PretrainedConfig) -> Any:
    """Build the model of a config on torch's meta device: real names and shapes, but no weights.

    If Transformers saw a DeepSpeed config, it would shard the parameters. `SHARDED_BUILD` hides it.
    """
    with compat.SHARDED_BUILD.replaced_by(None, on=deepspeed), torch.device("meta"):
        return auto_class(config).from_config(config)


def _quantised_parameters(model: nn.Module) -> int:
    """Return how many parameters of a model are in layers that are quantised to 4 bits."""
    parameter_count = 0
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and is_quantised_layer(name):
            parameter_count += layer.weight.numel()
    return parameter_count


def _parameter_count_by_component(model: nn.Module, *, trained_only: bool) -> dict[str, int]:
    """Return the number of parameters in each of `COMPONENTS`.

    `trained_only`: whether only trained parameters are counted.
    """
    count_by_component = dict.fromkeys(COMPONENTS, 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trained_only:
            count_by_component[component_of(name)] += parameter.numel()
    return count_by_component


def _add_adapters(model: "PreTrainedModel", peft_config: "PeftConfig") -> "PeftModel":
    """Return a model on the meta device with the adapters of a PEFT config.

    Raises `UserError` for names that no module has, and for adapters that would not be trained.
    """
    from peft import get_peft_model

    _check_module_names(model, peft_config)
    # A copy of the config, since PEFT writes into the one that it gets.
    with torch.device("meta"):
        adapted_model = get_peft_model(model, deepcopy(peft_config), autocast_adapter_dtype=False)
    refuse_embedding_adapters(adapted_model)
    return adapted_model


def _adapter_inputs_per_token(model: nn.Module) -> int:
    """Return how many values per token the adapters of one decoder layer take as input.

    It is the sum of `in_features` over the layer's modules with an adapter. All decoder layers are
    alike, so the first one is counted.
    """
    value_count = 0
    for name, module in model.named_modules():
        is_in_first_layer = ".layers.0." in name and "visual" not in name
        has_adapter = hasattr(module, "lora_A")
        if is_in_first_layer and has_adapter:
            value_count += module.in_features
    return value_count


def language_layer_names(config: PretrainedConfig) -> list[str]:
    """Return the names of the language model's linear layers, without the output embedding.

    A name is the last part of a module's name, such as `q_proj`. Each comes once, in alphabetical
    order.
    """
    model = _build_without_memory(config)
    head = model.get_output_embeddings()
    names = set()
    for name, module in model.named_modules():
        is_in_language_model = component_of(f"{name}.weight") == LANGUAGE_MODEL
        if isinstance(module, nn.Linear) and module is not head and is_in_language_model:
            names.add(name.rpartition(".")[2])
    return sorted(names)


def layers_pattern(names: Sequence[str]) -> str:
    """Return a regular expression for LoRA's `target_modules` that leaves out the vision tower.

    The tower's MLP has layers of some of these names too. For example, with `up_proj` the pattern
    matches `model.language_model.layers.0.mlp.up_proj` and not `model.visual.blocks.0.mlp.up_proj`.
    PEFT matches it against the whole name of a module.
    """
    tower_names = {re.escape(vision.tower_name_part) for vision in vision_by_model_type().values()}
    towers = "|".join(sorted(tower_names))
    return rf"(?!.*({towers})).*\.({'|'.join(names)})"


def _check_module_names(model: "PreTrainedModel", peft_config: "PeftConfig") -> None:
    """Raise `UserError` for a name in `target_modules` or `modules_to_save` that no module has.

    PEFT ignores such a name if any other name of the list fits.
    """
    names = [name for name, _ in model.named_modules()]
    last_parts = {name.rpartition(".")[2] for name in names}
    for key, modules in (
        ("lora_target_modules", peft_config.target_modules),
        ("lora_modules_to_save", peft_config.modules_to_save),
    ):
        is_list = isinstance(modules, list | tuple | set)
        if not is_list:  # a regular expression, or None
            continue
        for module in sorted(modules):
            has_module = any(name == module or name.endswith(f".{module}") for name in names)
            if not has_module:
                suggestion = did_you_mean(module, last_parts)
                raise UserError(f"{key}: {module!r} is no module of this model{suggestion}")


def refuse_embedding_adapters(model: "PeftModel") -> None:
    """Raise `UserError` for a `PeftModel` with an adapter on an embedding that would be lost."""
    refuse_tied_adapters(model)
    refuse_head_adapters(model)


def refuse_head_adapters(model: "PeftModel") -> None:
    """Raise `UserError` for a `PeftModel` with an adapter on its output embedding.

    TRL multiplies the hidden states by the module's weight and does not call the module, so the
    adapter would never be trained.
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

    vLLM and a saved model have one matrix for both embeddings. Merged into it, the adapter would
    change the other embedding too, and the engine would sample from another model than the policy.
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
            # the user's key that has put the adapter there
            key = "lora_modules_to_save"
            if isinstance(embedding, BaseTunerLayer):
                key = "lora_target_modules"
            raise UserError(
                f"{key}: {name!r} shares its weight with the other embedding "
                "(tie_word_embeddings: true), so what it learns can be merged neither for the "
                "engine nor for a saved model; leave it out"
            )


def is_dtype_name(name: str) -> bool:
    """Return whether torch or Transformers has a dtype of this name."""
    torch_attribute = getattr(torch, name.removeprefix("torch."), None)
    return name == "auto" or isinstance(torch_attribute, torch.dtype)


def _resolve_dtype(name: str | None, config: PretrainedConfig) -> torch.dtype:
    """Return the torch dtype that a user calls `name`, such as `bfloat16`.

    `auto` and None mean the dtype in the model's config, as in Transformers 5. Raises `UserError`
    for a name that torch does not have.
    """
    dtype_or_name = config.dtype if name in (None, "auto") else name
    # A config may have no dtype either.
    dtype_name = str(dtype_or_name or "float32").removeprefix("torch.")
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"dtype: {name!r} is no dtype of torch; use bfloat16, float16, float32 or auto"
        )
    return dtype


def _text_tower(config: PretrainedConfig, family: Family | None) -> Tower:
    """Return the sizes of the language model's layers.

    `config`: the text config. `family`: None for a family that is not known.
    """
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
        has_head_norms=family is not None and family.has_head_norms,
    )


def _vision_shape_fields(config: PretrainedConfig, family: Family) -> dict[str, Any]:
    """Return the fields of a `ModelShape` that describe the vision tower, by their names.

    `config`: the model's `vision_config`.
    """
    # In Qwen2-VL `embed_dim` is the width of the tower, and `hidden_size` the width of its output.
    width = getattr(config, "embed_dim", None) or config.hidden_size
    # Qwen2-VL gives its MLP's width as a ratio.
    mlp_width = getattr(config, "intermediate_size", None) or int(width * config.mlp_ratio)
    tower = Tower(
        layers=config.depth,
        width=width,
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_size=width // config.num_heads,
        mlp_width=mlp_width,
        has_swiglu=family.vision is None or family.vision.has_swiglu,
    )
    channels = getattr(config, "in_channels", 3)
    return {
        "vision": tower,
        "patch_size": config.patch_size,
        "merge_size": config.spatial_merge_size,
        "deepstack_layers": len(getattr(config, "deepstack_visual_indexes", ())),
        "frames_per_patch": config.temporal_patch_size,
        "patch_values": channels * config.temporal_patch_size * config.patch_size**2,
    }
