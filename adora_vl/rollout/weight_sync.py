"""Sends the policy's weights, or its adapter, to the engine and empties the stale caches."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from adora_vl.models.adapter import vllm_lora_rank
from adora_vl.models.families import LANGUAGE_MODEL, component_of
from adora_vl.models.load import GatherParameters
from adora_vl.utils.errors import RolloutError, UserError

if TYPE_CHECKING:
    from peft import PeftModel
    from vllm import LLM

ADAPTER_NAME = "default"  # PEFT's name of the adapter that is trained


def _model_runner(llm: "LLM") -> Any:
    """Return the object of vLLM that holds the model and runs its steps."""
    return llm.llm_engine.model_executor.driver_worker.model_runner


def runner_version(llm: "LLM") -> str:
    """Return which of its two model runners vLLM has chosen, `V1` or `V2`.

    It is `V2` by default on a GPU, and `V1` on a CPU and for models that V2 does not support.
    """
    return "V2" if type(_model_runner(llm)).__module__.startswith("vllm.v1.worker.gpu.") else "V1"


def zero_discarded_buffers(llm: "LLM") -> None:
    """Zero the buffers that vLLM zeroes only when it builds the engine.

    Sleep level 2 discards their memory, and a step of the engine would read what is left in it:

    - `rope_state.positions`, the M-RoPE positions of model runner V2. A step writes the positions
      of its own tokens. Those of the padding behind them are read too, as indices into the rotary
      table.
    - `deepstack_input_embeds`, which Qwen3-VL adds to the hidden states of its first layers. A step
      with images writes them and clears them afterwards. A step without images adds them as they
      are.
    """
    runner = _model_runner(llm)
    rope_state = getattr(getattr(runner, "model_state", None), "rope_state", None)
    deepstack_buffers = getattr(getattr(runner, "model", None), "deepstack_input_embeds", None)
    buffers = []
    if rope_state is not None:
        buffers.append(rope_state.positions)
    if deepstack_buffers:
        buffers += deepstack_buffers
    # vLLM may have replaced a buffer by an inference tensor, which is read-only outside of this
    # mode.
    with torch.inference_mode():
        for buffer in buffers:
            buffer.zero_()


def push_weights(
    llm: "LLM", tensors: Iterable[tuple[str, Tensor]], *, is_whole_model: bool = False
) -> None:
    """Load tensors into the engine one by one.

    So only one tensor of a sharded model is whole at a time.

    Args:
        llm: the engine.
        tensors: the tensors by their names in Transformers.
        is_whole_model: whether the tensors are all that the model has. A GPU engine is then checked
            for a parameter that got no value.

    Raises `RolloutError` for such a parameter. After a sleep its memory would be uninitialised.
    """
    runner = _model_runner(llm)
    if runner.device.type == "cpu":
        # The CPU engine repacks its layers after loading, which only vLLM's `reload_weights` can
        # undo. It keeps the tensors of a layer until all of them have come. By then the originals
        # may have changed, so it gets copies.
        copies = ((name, tensor.detach().clone()) for name, tensor in tensors)
        runner.reload_weights(weights_iterator=copies)
        return
    loaded_names: set[str] = set()
    for name, tensor in tensors:
        loaded_names |= runner.model.load_weights([(name, tensor)])
    if is_whole_model:
        _refuse_incomplete_sync(runner.model, loaded_names)


def adapter_only_settings(policy: "PeftModel") -> Mapping[str, Any] | None:
    """Return vLLM's LoRA settings for a policy whose adapter can be sent without the weights.

    vLLM takes the two LoRA factors of linear layers, but no bias, no `modules_to_save`, no adapter
    of another kind and no weights. If anything of that is trained, the result is None.

    For example, LoRA of rank 8 on linear layers of the language model gives `{"enable_lora": True,
    "max_lora_rank": 8, "enable_tower_connector_lora": False}`.
    """
    if ADAPTER_NAME not in getattr(policy, "peft_config", ()):
        return None
    config = policy.peft_config[ADAPTER_NAME]
    layers = dict(_adapter_layers(policy))
    factors = []
    for layer in layers.values():
        factors += [layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]]
    linear_factors = [factor for factor in factors if isinstance(factor, nn.Linear)]
    has_other_factors = len(linear_factors) < len(factors)  # of embeddings or convolutions
    # The `id`s of parameters tell whether anything but linear factors is trained.
    linear_ids = {id(factor.weight) for factor in linear_factors}
    trained_ids = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    trains_more = bool(trained_ids - linear_ids)
    if not layers or trains_more or has_other_factors or config.target_parameters:
        return None
    adapts_vision = any(component_of(name) != LANGUAGE_MODEL for name in layers)
    return {
        "enable_lora": True,
        "max_lora_rank": vllm_lora_rank(config),
        "enable_tower_connector_lora": adapts_vision,
    }


def adapter_tensors(policy: "PeftModel", gather: GatherParameters) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the two LoRA factors of each layer of the policy's adapter.

    The names are like `base_model.model.LAYER.lora_A.weight`. Factor B is multiplied by the scaling
    of its layer here, for example by 2 for alpha 16 and rank 8. vLLM itself would multiply all
    layers by one alpha / r, and ignore the scaling of single ones (`rank_pattern`, rsLoRA). So it
    is told that alpha = r, which leaves the product as it is.

    `gather` makes sharded parameters whole, which is collective. So every rank has to iterate.
    """
    for name, layer in _adapter_layers(policy):
        factor_a = layer.lora_A[ADAPTER_NAME].weight
        factor_b = layer.lora_B[ADAPTER_NAME].weight
        with gather([factor_a, factor_b]):
            yield f"{name}.lora_A.weight", factor_a.detach().clone()
            yield f"{name}.lora_B.weight", factor_b.detach() * layer.scaling[ADAPTER_NAME]


def push_adapter(llm: "LLM", named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the LoRA adapter in the engine.

    `named_tensors` are those of `adapter_tensors`. Raises `RolloutError` where the engine has no
    layer for a part of the adapter. vLLM itself would ignore that part.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    runner = _model_runner(llm)
    lora_config = runner.lora_manager.lora_config
    rank = lora_config.max_lora_rank
    manager = runner.lora_manager._adapter_manager
    # Some models have other names in vLLM than in Transformers.
    weights_mapper = getattr(runner.get_model(), "hf_to_vllm_mapper", None)
    rename_mapper = None if weights_mapper is None else weights_mapper.get_rename_mapper()
    adapter_id = llm.adapter.lora_int_id
    adapter = LoRAModel.from_lora_tensors(
        adapter_id,
        dict(named_tensors),
        # vLLM multiplies by alpha / r. The tensors have their scaling already, so it has to be 1.
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=lora_config.lora_dtype,
        weights_mapper=rename_mapper,
    )
    manager.remove_adapter(adapter_id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter_id)
    missing = sorted(adapter.loras.keys() - manager.modules.keys())
    if missing:
        raise RolloutError(
            f"the engine has no layer for {len(missing)} parts of the adapter, the first is "
            f"{missing[0]}; leave it out of lora_target_modules"
        )


def _adapter_layers(policy: "PeftModel") -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each layer that has a part of the trained LoRA adapter."""
    for name, module in policy.named_modules():
        if ADAPTER_NAME in getattr(module, "lora_A", ()):
            yield name, module


def _refuse_incomplete_sync(model: nn.Module, loaded_names: Collection[str]) -> None:
    """Raise `RolloutError` where a parameter of the engine's model was not loaded.

    A tied parameter has two names and one memory, and is loaded under one of the names. For
    example, an `lm_head` that is tied to the embedding has its value once the embedding is loaded.
    So parameters are compared by the address of their memory.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded_addresses = set()
    for name in loaded_names:
        if name in parameters:
            loaded_addresses.add(parameters[name].data_ptr())
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.data_ptr() not in loaded_addresses
    ]
    if missing:
        raise RolloutError(
            f"{len(missing)} of the engine's {len(parameters)} parameters got no value in a sync of "
            f"the whole model, the first is {missing[0]}; rollouts would not be the policy's. "
            "Check the versions with the doctor, or set use_vllm: false"
        )


def reset_caches(llm: "LLM") -> None:
    """Empty the engine's caches of prefixes and image features, which old weights have filled.

    Raises `RolloutError` where the engine refuses, since a request is running.
    """
    if not llm.reset_prefix_cache():
        raise RolloutError(
            "the engine did not reset its prefix cache after a weight sync: requests are still "
            "running"
        )
    llm.llm_engine.reset_encoder_cache()


def can_merge(model: "PeftModel", gather: GatherParameters) -> bool:
    """Return whether PEFT can merge everything that this model trains into its weights.

    Prompt tuning, for example, adds tokens instead of changing weights. For each kind of layer with
    an adapter a copy of one layer is merged, to see whether PEFT refuses.

    `gather` makes sharded parameters whole, which is collective: all ranks call this together.
    """
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model.base_model, BaseTuner):
        return False
    modules = [prefixed.module for prefixed in _modules_to_sync(model.get_base_model())]
    # Parameters are told apart by Python's `id` of the object.
    synced_ids = {id(parameter) for module in modules for parameter in module.parameters()}
    trained_ids = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained_ids <= synced_ids:  # something outside of the layers is trained
        return False
    try:
        for layer in _adapted_layer_of_each_kind(modules):
            with gather(list(layer.parameters())):
                _merged_copy(layer)
    except (NotImplementedError, ValueError):  # what PEFT raises for an adapter it cannot merge
        return False
    except RuntimeError as error:
        # PEFT raises it, with a message about merging, for a bias of LoRA (`lora_bias`) on a layer
        # that has no bias. Any other `RuntimeError` is a fault of its own.
        if "merge" not in str(error):
            raise
        return False
    return True


def _adapted_layer_of_each_kind(modules: Iterable[nn.Module]) -> Collection[nn.Module]:
    """Return one layer of each kind, out of those that have an adapter.

    Layers of one kind have the same class and parameters of the same names.
    """
    layer_by_kind = {}
    for module in modules:
        if _is_adapted(module):
            names = [name for name, _ in module.named_parameters()]
            layer_by_kind[(type(module), *names)] = module
    return layer_by_kind.values()


def refuse_unmergeable(model: "PeftModel", gather: GatherParameters) -> None:
    """Raise `UserError` where PEFT cannot merge the adapters of this model into its weights.

    An engine and a saved model both need the merged weights. `gather` makes sharded parameters
    whole, which is collective: all ranks call this together.
    """
    if not can_merge(model, gather):
        peft_types = [config.peft_type for config in model.peft_config.values()]
        names = {str(getattr(peft_type, "value", peft_type)) for peft_type in peft_types}
        kinds = ", ".join(sorted(names))
        raise UserError(
            f"peft_config: {kinds}: PEFT cannot merge this adapter into the weights of this "
            "model, as the engine and the evaluators need it; choose another one, such as LoRA"
        )


def merged_parameters(
    model: "PeftModel",
    gather: GatherParameters,
    includes: Callable[[str], bool],
    changed_only: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of a model's parameters, with its active adapters merged in.

    The values are those of `merge_and_unload`. PEFT itself merges a copy of one layer at a time, in
    float32. So the model stays as it is, and every kind of adapter works that PEFT can merge. For
    example, a layer `proj` with LoRA gives only `proj.weight`, with the sum of its weight and the
    scaled product of the factors.

    Args:
        model: the policy.
        gather: makes sharded parameters whole, which is collective. So every rank has to iterate.
        includes: says whether the parameter of this name is yielded. Names are those of a model
            without adapters.
        changed_only: whether to leave out parameters that have no adapter and are not trained.
    """
    seen_ids: set[int] = set()  # a tied parameter is yielded once
    for prefix, module in _modules_to_sync(model.get_base_model()):
        is_adapted = _is_adapted(module)
        # The adapter's own parameters are not sent: the names are those of the layer inside it.
        layer = _layer_without_adapter(module)
        # A module without an adapter gives only its own parameters: its children are modules of
        # this loop too. A layer with an adapter gives those of its children as well.
        parameter_by_name = dict(layer.named_parameters(recurse=is_adapted))
        chosen_parameters = {}
        for name, parameter in parameter_by_name.items():
            if id(parameter) not in seen_ids and includes(prefix + name):
                chosen_parameters[name] = parameter
        seen_ids |= {id(parameter) for parameter in parameter_by_name.values()}
        if is_adapted and chosen_parameters:
            # To merge, the adapter's own parameters have to be whole as well.
            with gather(list(module.parameters())):
                merged_values = dict(_merged_copy(module).named_parameters())
            for name, parameter in chosen_parameters.items():
                yield prefix + name, merged_values[name].data.to(parameter.dtype)
        elif not is_adapted:
            for name, parameter in chosen_parameters.items():
                if parameter.requires_grad or not changed_only:
                    with gather([parameter]):
                        yield prefix + name, parameter.data


class _PrefixedModule(NamedTuple):
    """A module with parameters, and the prefix of their names in a model without adapters."""

    prefix: str
    module: nn.Module


def _modules_to_sync(module: nn.Module, prefix: str = "") -> Iterator[_PrefixedModule]:
    """Yield the modules of a model whose parameters are merged and sent one after another.

    A layer with an adapter is yielded as a whole, without its children. Every other module is
    yielded for its own parameters, and then its children. A module in PEFT's `modules_to_save` is
    replaced by the copy of it that is trained. For example, a model with a layer `embed`, and a
    layer `proj` with LoRA, gives ("", model), ("embed.", embed) and ("proj.", proj).

    `prefix`: the prefix of the names of the module's own parameters.
    """
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active_adapters = module.active_adapters
        chosen_module = module.original_module
        if active_adapters:
            chosen_module = module.modules_to_save[active_adapters[0]]
        yield from _modules_to_sync(chosen_module, prefix)
        return
    yield _PrefixedModule(prefix, module)
    if not _is_adapted(module):
        for name, child in module.named_children():
            yield from _modules_to_sync(child, f"{prefix}{name}.")


def _is_adapted(module: nn.Module) -> bool:
    """Return whether PEFT has put an adapter around this module."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _layer_without_adapter(module: Any) -> nn.Module:
    """Return the layer inside a module with an adapter; any other module as it is."""
    base = module
    if _is_adapted(module):
        base = module.get_base_layer() if hasattr(module, "base_layer") else module.original_module
    return cast("nn.Module", base)


def _merged_copy(module: nn.Module) -> nn.Module:
    """Return a copy of the layer inside a module with an adapter, with the adapter merged in.

    The copy has at least float32, so that the sum of weight and adapter is rounded once.

    `deepcopy` is told what the copy gets in place of some objects: parameters in float32, and no
    hooks, since a hook of DeepSpeed refers to its whole engine, which would be copied too.
    """
    replacement_by_id: dict[int, Any] = {}  # what the copy gets in place of the object of this `id`
    for part in module.modules():
        parameters = {}
        for name, parameter in part._parameters.items():
            parameters[name] = None if parameter is None else _float32_copy(parameter)
        replacement_by_id[id(part._parameters)] = parameters
        for name, value in vars(part).items():
            if name.endswith("hooks"):
                replacement_by_id[id(value)] = type(value)()
    copy: Any = deepcopy(module, memo=replacement_by_id)
    if hasattr(copy, "unload_and_optionally_merge_module"):
        merged = copy.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
        return cast("nn.Module", merged)
    copy.merge()
    return _layer_without_adapter(copy)


def _float32_copy(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy of the parameter, in at least float32 if it is floating point."""
    dtype = parameter.dtype
    if parameter.is_floating_point():
        dtype = torch.promote_types(dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=False)
