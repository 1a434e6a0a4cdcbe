"""The policy's weights into the engine, merged with the adapter's, and the caches that they make stale."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from adora_vl.utils.errors import RolloutError


def _model_runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner


def runner_version(llm: Any) -> str:
    """Which of its model runners vLLM has chosen: `V2` by default on a GPU, `V1` on a CPU and where it must."""
    return "V2" if type(_model_runner(llm)).__module__.startswith("vllm.v1.worker.gpu.") else "V1"


def zero_scratch(llm: Any) -> None:
    """Write zeros where vLLM wrote them once, when the engine was built, into memory that sleep level 2 discards.

    The M-RoPE positions of model runner V2: a step writes those of its own tokens; padded ones read what is there, as
    indices into the rotary table. V1 allocates them elsewhere. And what Qwen3-VL adds to the hidden states of its first
    layers: a step with images writes it and clears it, one without adds what is there.
    """
    runner = _model_runner(llm)
    rope = getattr(getattr(runner, "model_state", None), "rope_state", None)
    added = getattr(getattr(runner, "model", None), "deepstack_input_embeds", None)
    with torch.inference_mode():  # where a step has made one of them anew
        for tensor in [*([] if rope is None else [rope.positions]), *(added or [])]:
            tensor.zero_()


def push_weights(llm: Any, tensors: Iterable[tuple[str, Tensor]], everything: bool = False) -> int:
    """Load `tensors` (Transformers names) into the engine. Returns how many there were.

    The tensors are streamed one by one, so that no more than one tensor of a sharded model is whole at a time. The CPU
    engine repacks its linear layers after loading, which only `reload_weights` can handle. It keeps the tensors of a
    layer until all have come, so each has to be a copy.

    With `everything`, `tensors` are the whole model. Raises `RolloutError` where a parameter of a GPU engine got none:
    with sleep mode it would have nothing but memory that nobody has written.
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


def _check_complete(model: nn.Module, loaded: Collection[str]) -> None:
    """Raise `RolloutError` for the first parameter that was not loaded under any of its names. Tied ones have two."""
    named = dict(model.named_parameters(remove_duplicate=False))
    arrived = {named[name].data_ptr() for name in loaded if name in named}
    missing = [name for name, parameter in named.items() if parameter.data_ptr() not in arrived]
    if missing:
        raise RolloutError(
            f"{len(missing)} of the engine's {len(named)} parameters got no value in a sync of the whole model, the "
            f"first is {missing[0]}; rollouts would not be the policy's. Check the versions with the doctor, or set "
            "use_vllm: false"
        )


def reset_caches(llm: Any) -> None:
    """Empty the caches of prefixes and image features. Raises `RolloutError` if the engine refuses."""
    if not llm.reset_prefix_cache():
        raise RolloutError("the engine did not reset its prefix cache after a weight sync: requests are still running")
    llm.llm_engine.reset_encoder_cache()


Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager[Any]]


def _adapted_layers(model: Any) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def can_merge(model: Any) -> bool:
    """Whether every adapter is plain LoRA, `W + B A`. DoRA and other adapters are left to peft's own merging."""
    from peft.tuners.lora import LoraLayer

    return all(
        isinstance(layer, LoraLayer) and not any(layer.use_dora.get(name) for name in layer.active_adapters)
        for layer in _adapted_layers(model).values()
    )


def merged_parameters(
    model: Any, gather: Gather, wanted: Callable[[str], bool], changed_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields `(Transformers name, tensor)` of a `PeftModel`, one tensor at a time. Adapters are added in float32 to a
    copy, so the model itself is not changed.

    `gather` makes sharded parameters whole, so every rank has to iterate. `changed_only`: leave out tensors that have
    no adapter and are not trained.
    """
    layers = _adapted_layers(model)
    for name, parameter in model.named_parameters():
        plain = (
            name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save.default", "")
        )
        if model.prefix in name or ".original_module." in name or not wanted(plain):
            continue
        owner, _, kind = name.rpartition(".base_layer.")
        layer: Any = layers.get(owner) if kind == "weight" else None
        adapters = [a for a in layer.active_adapters if a in layer.lora_A] if layer is not None else []
        if changed_only and not adapters and not parameter.requires_grad:
            continue
        factors = [p for a in adapters for p in (*layer.lora_A[a].parameters(), *layer.lora_B[a].parameters())]
        with gather([parameter, *factors]):
            tensor = parameter.data
            if adapters:
                delta = sum(layer.get_delta_weight(adapter).float() for adapter in adapters)
                tensor = (tensor.float() + delta).to(tensor.dtype)
            yield plain, tensor.detach()
