"""Sends the policy's weights, or its adapter, to the engine and empties the stale caches."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from adora_vl.models.adapter import served_rank
from adora_vl.models.families import LANGUAGE_MODEL, component_of
from adora_vl.utils.errors import RolloutError, UserError

if TYPE_CHECKING:
    from peft import PeftModel
    from vllm import LLM

ADAPTER_NAME = "default"  # PEFT's name of the adapter that is trained
# the context in which sharded parameters are whole; entering it is a collective call
Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager[Any]]


def _model_runner(llm: "LLM") -> Any:
    """Return the object in vLLM that has the model."""
    return llm.llm_engine.model_executor.driver_worker.model_runner


def runner_version(llm: "LLM") -> str:
    """Return the model runner that vLLM has chosen.

    It is `V2` by default on a GPU, and `V1` on a CPU and for what V2 does not support.
    """
    return "V2" if type(_model_runner(llm)).__module__.startswith("vllm.v1.worker.gpu.") else "V1"


def zero_scratch(llm: "LLM") -> None:
    """Zero the buffers that vLLM zeroes only once, when the engine is built.

    Sleep level 2 discards their memory. One is the M-RoPE positions of model runner V2: a step
    writes those of its own tokens, and padding reads what is left as indices into the rotary table
    (V1 allocates them elsewhere). The others are what Qwen3-VL adds to the hidden states of its
    first layers: a step with images writes and clears them, a step without images adds what is
    left.
    """
    runner = _model_runner(llm)
    rope = getattr(getattr(runner, "model_state", None), "rope_state", None)
    deepstack = getattr(getattr(runner, "model", None), "deepstack_input_embeds", None)
    buffers = [] if rope is None else [rope.positions]
    if deepstack:
        buffers += deepstack
    with torch.inference_mode():  # a step may have replaced a buffer by an inference tensor
        for buffer in buffers:
            buffer.zero_()


def push_weights(
    llm: "LLM", tensors: Iterable[tuple[str, Tensor]], everything: bool = False
) -> int:
    """Load `tensors` (by their Transformers names) into the engine; return their number.

    The tensors are streamed one by one, so that no more than one tensor of a sharded model is whole
    at a time. The CPU engine repacks its linear layers after loading, which only `reload_weights`
    can handle. It keeps the tensors of a layer until all have come, so each has to be a copy.

    With `everything`, `tensors` are the whole model. Raises `RolloutError` where a parameter of a
    GPU engine got no value: with sleep mode its memory would be uninitialised.
    """
    runner = _model_runner(llm)
    count = 0

    def copies() -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the tensors, and count them."""
        nonlocal count
        for name, tensor in tensors:
            count += 1
            yield name, tensor.detach().clone()

    if runner.device.type == "cpu":
        runner.reload_weights(weights_iterator=copies())
        return count
    loaded_names: set[str] = set()
    for name, tensor in tensors:
        loaded_names |= runner.model.load_weights([(name, tensor)])
        count += 1
    if everything:
        _check_complete(runner.model, loaded_names)
    return count


def lora_settings(policy: "PeftModel") -> Mapping[str, Any] | None:
    """Return vLLM's settings for an engine that gets nothing but the policy's adapter.

    None where more is trained than the two LoRA factors of linear layers: a bias,
    `modules_to_save`, an adapter of another kind, or all weights.
    """
    if ADAPTER_NAME not in getattr(policy, "peft_config", ()):
        return None
    config = policy.peft_config[ADAPTER_NAME]
    layers = dict(_adapter_layers(policy))
    factors = []
    for layer in layers.values():
        factors += [layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]]
    # Factors of embeddings and convolutions are no `nn.Linear`, and vLLM takes none of them.
    linear_ids = {id(factor.weight) for factor in factors if isinstance(factor, nn.Linear)}
    trained_ids = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    has_other_factors = len(linear_ids) < len(factors)
    trains_more = bool(trained_ids - linear_ids)
    if not layers or trains_more or has_other_factors or config.target_parameters:
        return None
    adapts_vision = any(component_of(name) != LANGUAGE_MODEL for name in layers)
    return {
        "enable_lora": True,
        "max_lora_rank": served_rank(config),
        "enable_tower_connector_lora": adapts_vision,
    }


def adapter_tensors(policy: "PeftModel", gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and factors of the policy's LoRA adapter.

    The second factor is multiplied by the scaling of its layer. vLLM itself would multiply it by
    alpha / r in place, and its reader ignores the settings of single layers (`rank_pattern`,
    rsLoRA). So the product is a copy, and the engine gets it with alpha = r. `gather` makes sharded
    parameters whole, so every rank has to iterate.
    """
    for name, layer in _adapter_layers(policy):
        first = layer.lora_A[ADAPTER_NAME].weight
        second = layer.lora_B[ADAPTER_NAME].weight
        with gather([first, second]):
            yield f"{name}.lora_A.weight", first.detach().clone()
            yield f"{name}.lora_B.weight", second.detach() * layer.scaling[ADAPTER_NAME]


def push_adapter(llm: "LLM", named_tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Replace the engine's adapter by that of `adapter_tensors`; return the number of tensors.

    Raises `RolloutError` where the engine has no layer for a part of the adapter, which it would
    ignore.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    tensors = dict(named_tensors)
    runner = _model_runner(llm)
    lora_config = runner.lora_manager.lora_config
    rank = lora_config.max_lora_rank
    manager = runner.lora_manager._adapter_manager
    weights_mapper = getattr(runner.get_model(), "hf_to_vllm_mapper", None)
    adapter_id = llm.adapter.lora_int_id
    adapter = LoRAModel.from_lora_tensors(
        adapter_id,
        tensors,
        # vLLM multiplies by alpha / r, which is 1: the tensors are scaled already.
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=lora_config.lora_dtype,
        weights_mapper=weights_mapper and weights_mapper.get_rename_mapper(),
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
    return len(tensors)


def _adapter_layers(policy: "PeftModel") -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each layer that has a part of the trained LoRA adapter."""
    for name, module in policy.named_modules():
        if ADAPTER_NAME in getattr(module, "lora_A", ()):
            yield name, module


def _check_complete(model: nn.Module, loaded_names: Collection[str]) -> None:
    """Raise `RolloutError` for the first parameter that was not loaded under any of its names.

    Tied parameters have two names, and are told by their memory.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded_memory = set()
    for name in loaded_names:
        if name in parameters:
            loaded_memory.add(parameters[name].data_ptr())
    missing = [
        name for name, parameter in parameters.items() if parameter.data_ptr() not in loaded_memory
    ]
    if missing:
        raise RolloutError(
            f"{len(missing)} of the engine's {len(parameters)} parameters got no value in a sync of "
            f"the whole model, the first is {missing[0]}; rollouts would not be the policy's. "
            "Check the versions with the doctor, or set use_vllm: false"
        )


def reset_caches(llm: "LLM") -> None:
    """Empty the engine's caches of prefixes and image features, which old weights have filled.

    Raises `RolloutError` if the engine refuses.
    """
    if not llm.reset_prefix_cache():
        raise RolloutError(
            "the engine did not reset its prefix cache after a weight sync: requests are still "
            "running"
        )
    llm.llm_engine.reset_encoder_cache()


def can_merge(model: "PeftModel", gather: Gather = lambda parameters: nullcontext()) -> bool:
    """Return whether everything that a `PeftModel` trains is in weights that PEFT can merge.

    Prompt tuning, for example, adds tokens instead of changing weights. Merging is tried on one
    layer of each kind. Collective: all ranks call it together, since `gather` is.
    """
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model.base_model, BaseTuner):
        return False
    modules = [module for _, module in _parts(model.get_base_model())]
    reachable_ids = {id(parameter) for module in modules for parameter in module.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(id(parameter) not in reachable_ids for parameter in trained):
        return False
    # Layers of one kind have the same class and parameters of the same names.
    layer_of_kind = {}
    for module in modules:
        if _is_adapted(module):
            names = [name for name, _ in module.named_parameters()]
            layer_of_kind[(type(module), *names)] = module
    try:
        for layer in layer_of_kind.values():
            with gather(list(layer.parameters())):
                _merged_copy(layer)
    except (NotImplementedError, ValueError):
        return False
    return True


def refuse_unmergeable(model: "PeftModel", gather: Gather) -> None:
    """Raise `UserError` for a `PeftModel` whose adapters PEFT cannot merge.

    An engine and a saved model both need the merged weights.
    """
    if not can_merge(model, gather):
        types = [config.peft_type for config in model.peft_config.values()]
        kinds = ", ".join(sorted({str(getattr(kind, "value", kind)) for kind in types}))
        raise UserError(
            f"peft_config: {kinds}: PEFT cannot merge this adapter into the weights of this "
            "model, as the engine and the evaluators need it; choose another one, such as LoRA"
        )


def merged_parameters(
    model: "PeftModel", gather: Gather, includes: Callable[[str], bool], changed_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield `(Transformers name, tensor)` of a `PeftModel` with its active adapters merged in.

    The tensors are those of `merge_and_unload`. PEFT itself merges a copy, in float32, of one layer
    at a time. So the model is not changed, and every kind of adapter that PEFT can merge works.
    `gather` makes sharded parameters whole, so every rank has to iterate.

    `includes`: whether the parameter of this name is sent. `changed_only`: leave out tensors that
    have no adapter and are not trained.
    """
    sent_ids: set[int] = set()  # tied parameters are sent once
    for prefix, module in _parts(model.get_base_model()):
        is_adapted = _is_adapted(module)
        parameters = dict(_base_of(module).named_parameters(recurse=is_adapted))
        unsent = {}
        for name, parameter in parameters.items():
            if id(parameter) not in sent_ids and includes(prefix + name):
                unsent[name] = parameter
        sent_ids |= {id(parameter) for parameter in parameters.values()}
        if not unsent:
            continue
        if is_adapted:
            with gather(list(module.parameters())):
                merged = dict(_merged_copy(module).named_parameters())
            for name, parameter in unsent.items():
                yield prefix + name, merged[name].data.to(parameter.dtype)
            continue
        for name, parameter in unsent.items():
            if parameter.requires_grad or not changed_only:
                with gather([parameter]):
                    yield prefix + name, parameter.data


def _parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below `module` that hold parameters, each with the prefix of their names.

    The prefix is that of a model without adapters. A module in PEFT's `modules_to_save` is replaced
    by its trained copy. A module with an adapter is yielded as a whole, without its children.
    """
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapters
        yield from _parts(
            module.modules_to_save[active[0]] if active else module.original_module, path
        )
        return
    yield path, module
    if not _is_adapted(module):
        for name, child in module.named_children():
            yield from _parts(child, f"{path}{name}.")


def _is_adapted(module: nn.Module) -> bool:
    """Return whether PEFT has put an adapter around this module."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _base_of(module: Any) -> nn.Module:
    """Return the layer that an adapter changes, or the module itself."""
    base = module
    if _is_adapted(module):
        base = module.get_base_layer() if hasattr(module, "base_layer") else module.original_module
    return cast("nn.Module", base)


def _merged_copy(module: nn.Module) -> nn.Module:
    """Return a copy of the layer below an adapter, in at least float32, with the adapter merged in.

    `deepcopy` takes what stands in its memo instead of copying it. So the copy gets parameters of
    at least float32, and empty hooks: DeepSpeed's refer to its whole engine, which would be copied
    too.
    """
    memo: dict[int, Any] = {}  # `id` of an object of the original -> its stand-in in the copy
    for part in module.modules():
        parameters = {}
        for name, parameter in part._parameters.items():
            parameters[name] = None if parameter is None else _float32_copy(parameter)
        memo[id(part._parameters)] = parameters
        for name, value in vars(part).items():
            if name.endswith("hooks"):
                memo[id(value)] = type(value)()
    copy: Any = deepcopy(module, memo)
    if hasattr(copy, "unload_and_optionally_merge_module"):
        return cast("nn.Module", copy.unload_and_optionally_merge_module(True, False, None))
    copy.merge()
    return _base_of(copy)


def _float32_copy(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy of the parameter, in at least float32 if it is floating point."""
    dtype = parameter.dtype
    if parameter.is_floating_point():
        dtype = torch.promote_types(dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=False)
