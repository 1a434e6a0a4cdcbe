"""The policy's weights into the engine, merged with the adapter's, and the caches that they make
stale.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from adora_vl.models.adapter import served_rank
from adora_vl.models.families import LANGUAGE_MODEL, component_of
from adora_vl.utils.errors import RolloutError, UserError

ADAPTER_NAME = "default"  # PEFT's, of the adapter that is trained
Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager[Any]]


def _model_runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner


def runner_version(llm: Any) -> str:
    """Which of its model runners vLLM has chosen: `V2` by default on a GPU, `V1` on a CPU and where
    it must.
    """
    return "V2" if type(_model_runner(llm)).__module__.startswith("vllm.v1.worker.gpu.") else "V1"


def zero_scratch(llm: Any) -> None:
    """Write zeros where vLLM wrote them once, when the engine was built, into memory that sleep
    level 2 discards.

    The M-RoPE positions of model runner V2: a step writes those of its own tokens; padded ones read
    what is there, as indices into the rotary table. V1 allocates them elsewhere. And what Qwen3-VL
    adds to the hidden states of its first layers: a step with images writes it and clears it, one
    without adds what is there.
    """
    runner = _model_runner(llm)
    rope = getattr(getattr(runner, "model_state", None), "rope_state", None)
    added = getattr(getattr(runner, "model", None), "deepstack_input_embeds", None)
    with torch.inference_mode():  # where a step has made one of them anew
        for tensor in [*([] if rope is None else [rope.positions]), *(added or [])]:
            tensor.zero_()


def push_weights(llm: Any, tensors: Iterable[tuple[str, Tensor]], everything: bool = False) -> int:
    """Load `tensors` (Transformers names) into the engine.

    Returns how many there were.

    The tensors are streamed one by one, so that no more than one tensor of a sharded model is whole
    at a time. The CPU engine repacks its linear layers after loading, which only `reload_weights`
    can handle. It keeps the tensors of a layer until all have come, so each has to be a copy.

    With `everything`, `tensors` are the whole model. Raises `RolloutError` where a parameter of a
    GPU engine got none: with sleep mode it would have nothing but memory that nobody has written.
    """
    runner = _model_runner(llm)
    count = 0

    def copies() -> Iterator[tuple[str, Tensor]]:
        nonlocal count
        for name, tensor in tensors:
            count += 1
            yield name, tensor.detach().clone()

    if runner.device.type == "cpu":
        runner.reload_weights(weights_iterator=copies())
        return count
    loaded: set[str] = set()
    for name, tensor in tensors:
        loaded |= runner.model.load_weights([(name, tensor)])
        count += 1
    if everything:
        _check_complete(runner.model, loaded)
    return count


def lora_settings(policy: Any) -> Mapping[str, Any] | None:
    """vLLM's settings of an engine that gets the policy's adapter alone; None where there is more
    to what is trained than the two factors of linear layers: a bias, `modules_to_save`, an adapter
    of another kind, all weights.
    """
    if ADAPTER_NAME not in getattr(policy, "peft_config", ()):
        return None
    config = policy.peft_config[ADAPTER_NAME]
    layers = dict(_adapter_layers(policy))
    factors = [
        part[ADAPTER_NAME] for layer in layers.values() for part in (layer.lora_A, layer.lora_B)
    ]
    sent = {id(one.weight) for one in factors if isinstance(one, nn.Linear)}
    trained = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    if not layers or trained - sent or len(sent) < len(factors) or config.target_parameters:
        return None
    sees = any(component_of(name) != LANGUAGE_MODEL for name in layers)
    return {
        "enable_lora": True,
        "max_lora_rank": served_rank(config),
        "enable_tower_connector_lora": sees,
    }


def adapter_tensors(policy: Any, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and factors of the policy's LoRA adapter, the second one times the scaling
    of its layer.

    vLLM multiplies it by alpha / r in place, and its reader drops what single layers have of their
    own (`rank_pattern`, rsLoRA). So it is a product that no one else has, for which alpha is r.
    `gather` makes sharded parameters whole, so every rank has to iterate.
    """
    for name, layer in _adapter_layers(policy):
        first = layer.lora_A[ADAPTER_NAME].weight
        second = layer.lora_B[ADAPTER_NAME].weight
        with gather([first, second]):
            yield f"{name}.lora_A.weight", first.detach().clone()
            yield f"{name}.lora_B.weight", second.detach() * layer.scaling[ADAPTER_NAME]


def push_adapter(llm: Any, given: Iterable[tuple[str, Tensor]]) -> int:
    """Give the engine an adapter, of `adapter_tensors`, in the place of the one before.

    Returns the tensors' number.

    What the engine has no layer for it would pass over: raises `RolloutError`.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    tensors = dict(given)
    runner = _model_runner(llm)
    rank = runner.lora_manager.lora_config.max_lora_rank
    manager = runner.lora_manager._adapter_manager
    renamed = getattr(runner.get_model(), "hf_to_vllm_mapper", None)
    number = llm.adapter.lora_int_id
    adapter = LoRAModel.from_lora_tensors(
        number,
        tensors,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=runner.lora_manager.lora_config.lora_dtype,
        weights_mapper=renamed and renamed.get_rename_mapper(),
    )
    manager.remove_adapter(number)
    manager.add_adapter(adapter)
    manager.activate_adapter(number)
    if missing := sorted(adapter.loras.keys() - manager.modules.keys()):
        raise RolloutError(
            f"the engine has no layer for {len(missing)} parts of the adapter, the first is "
            f"{missing[0]}; leave it out of lora_target_modules"
        )
    return len(tensors)


def _adapter_layers(policy: Any) -> Iterator[tuple[str, Any]]:
    """Name and layer of each layer with a part of the LoRA adapter that is trained."""
    for name, module in policy.named_modules():
        if ADAPTER_NAME in getattr(module, "lora_A", ()):
            yield name, module


def _check_complete(model: nn.Module, loaded: Collection[str]) -> None:
    """Raise `RolloutError` for the first parameter that was not loaded under any of its names.

    Tied ones have two.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    arrived = {named[name].data_ptr() for name in loaded if name in named}
    missing = [name for name, parameter in named.items() if parameter.data_ptr() not in arrived]
    if missing:
        raise RolloutError(
            f"{len(missing)} of the engine's {len(named)} parameters got no value in a sync of "
            f"the whole model, the first is {missing[0]}; rollouts would not be the policy's. "
            "Check the versions with the doctor, or set use_vllm: false"
        )


def reset_caches(llm: Any) -> None:
    """Empty the caches of prefixes and image features.

    Raises `RolloutError` if the engine refuses.
    """
    if not llm.reset_prefix_cache():
        raise RolloutError(
            "the engine did not reset its prefix cache after a weight sync: requests are still "
            "running"
        )
    llm.llm_engine.reset_encoder_cache()


def can_merge(model: Any, gather: Gather = lambda parameters: nullcontext()) -> bool:
    """Whether all that a `PeftModel` trains is in weights that PEFT can merge.

    All ranks ask together.

    Prompt tuning, for one, adds tokens in the place of changing weights. Merging is tried on one
    layer of each kind.
    """
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model.base_model, BaseTuner):
        return False
    parts = [part for _, part in _parts(model.get_base_model())]
    reached = {id(parameter) for part in parts for parameter in part.parameters()}
    if not all(
        id(parameter) in reached for parameter in model.parameters() if parameter.requires_grad
    ):
        return False
    kinds = {
        (type(part), *(name for name, _ in part.named_parameters())): part
        for part in parts
        if _is_adapted(part)
    }
    try:
        for part in kinds.values():
            with gather(list(part.parameters())):
                _merged(part)
    except (NotImplementedError, ValueError):
        return False
    return True


def refuse_unmergeable(model: Any, gather: Gather) -> None:
    """Raise `UserError` for a `PeftModel` whose adapters can be merged neither for an engine nor
    for a saved model.
    """
    if not can_merge(model, gather):
        kinds = ", ".join(
            sorted(
                {
                    str(getattr(c.peft_type, "value", c.peft_type))
                    for c in model.peft_config.values()
                }
            )
        )
        raise UserError(
            f"peft_config: {kinds}: PEFT cannot merge this adapter into the weights of this "
            "model, as the engine and the evaluators need it; choose another one, such as LoRA"
        )


def merged_parameters(
    model: Any, gather: Gather, wanted: Callable[[str], bool], changed_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields `(Transformers name, tensor)` of a `PeftModel` with its active adapters, as
    `merge_and_unload` makes it.

    PEFT itself merges a copy, in float32, of one layer at a time, so the model is not changed, and
    every adapter that PEFT can merge arrives. `gather` makes sharded parameters whole, so every
    rank has to iterate. `changed_only`: leave out tensors that have no adapter and are not trained.
    """
    seen: set[int] = set()  # tied parameters go once
    for path, module in _parts(model.get_base_model()):
        own = dict(_base_of(module).named_parameters(recurse=_is_adapted(module)))
        new = {
            name: parameter
            for name, parameter in own.items()
            if id(parameter) not in seen and wanted(path + name)
        }
        seen |= {id(parameter) for parameter in own.values()}
        if not new:
            continue
        if _is_adapted(module):
            with gather(list(module.parameters())):
                merged = dict(_merged(module).named_parameters())
            for name, parameter in new.items():
                yield path + name, merged[name].data.to(parameter.dtype)
            continue
        for name, parameter in new.items():
            if parameter.requires_grad or not changed_only:
                with gather([parameter]):
                    yield path + name, parameter.data


def _parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules below `module` that hold parameters, each with what stands before its parameters'
    names in a model without adapters. A module in PEFT's `modules_to_save` is its trained copy; one
    with an adapter is whole.
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
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _base_of(module: Any) -> nn.Module:
    """The layer that an adapter changes, or the module itself."""
    if not _is_adapted(module):
        return cast("nn.Module", module)
    return cast(
        "nn.Module",
        module.get_base_layer() if hasattr(module, "base_layer") else module.original_module,
    )


def _merged(module: nn.Module) -> nn.Module:
    """The layer of a module with an adapter, as PEFT merges and unloads it, of a copy in at least
    float32.
    """
    copied: dict[int, Any] = {}  # what the copy has in the place of an object of the original
    for part in module.modules():
        parameters = {
            name: None if p is None else _exact(p) for name, p in part._parameters.items()
        }
        copied[id(part._parameters)] = parameters
        # DeepSpeed's hooks know its whole engine.
        copied |= {
            id(value): type(value)() for name, value in vars(part).items() if name.endswith("hooks")
        }
    copy: Any = deepcopy(module, copied)
    if hasattr(copy, "unload_and_optionally_merge_module"):
        return cast("nn.Module", copy.unload_and_optionally_merge_module(True, False, None))
    copy.merge()
    return _base_of(copy)


def _exact(parameter: nn.Parameter) -> nn.Parameter:
    dtype = (
        torch.promote_types(parameter.dtype, torch.float32)
        if parameter.is_floating_point()
        else parameter.dtype
    )
    return nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=False)
