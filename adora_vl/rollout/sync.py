"""Sends new weights to a colocated engine, and empties its caches of results of the old ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from adora_vl.errors import RolloutError, UserError


def _model_runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner


def push_weights(llm: Any, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Load `tensors` (Transformers names) into the engine. Returns how many there were.

    The tensors are streamed one by one, so that no more than one tensor of a sharded model is whole at a time. The CPU
    engine repacks its linear layers after loading, which only `reload_weights` can handle. It keeps the tensors of a
    layer until all have come, so each has to be a copy.
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
    for name, tensor in tensors:
        runner.model.load_weights([(name, tensor)])
        count += 1
    return count


def reset_caches(llm: Any) -> None:
    """Empty the caches of prefixes and image features. Raises `RolloutError` if the engine refuses."""
    if not llm.reset_prefix_cache():
        raise RolloutError("the engine did not reset its prefix cache after a weight sync: requests are still running")
    llm.llm_engine.reset_encoder_cache()


def reset_server_encoder_cache(client: Any) -> None:
    """Ask a vLLM server (started with `VLLM_SERVER_DEV_MODE=1`, as TRL's own sync needs too) to forget features."""
    response = client.session.post(f"{client.base_url}/reset_encoder_cache")
    if response.status_code != 200:
        raise RolloutError(
            f"the vLLM server answered {response.status_code} to /reset_encoder_cache; it would go on with image "
            "features of the old vision tower. Start it with VLLM_SERVER_DEV_MODE=1"
        )


def engine_runs_on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build, whatever the trainer runs on."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def engine_is_eager(wanted: bool | None = None) -> bool:
    """Whether to run the engine without torch.compile and CUDA graphs. None: on a CPU.

    There vLLM 0.31 compiles anew at every start, since it cannot load what it compiled before ("Compiling model again
    due to a load failure"). That takes longer than what it saves in the rollouts of a short run.
    """
    return engine_runs_on_cpu() if wanted is None else wanted


def prefill_options(max_model_len: int | None, budget: int) -> dict[str, Any]:
    """The `LLM` arguments for how many tokens the engine processes at once: `budget`, on a CPU at least a whole prompt.

    If the prompt of a request with a seed is processed in two parts, the engine rewinds a random generator. Only CUDA's
    generators can do that ("CPU Generator does not use offset"), so on a CPU no prompt is processed in parts.
    """
    if not engine_runs_on_cpu():
        return {"max_num_batched_tokens": budget}
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(budget, max_model_len or 0)}


def refuse_on_cpu(config: Any, sleep_mode: bool) -> None:
    """Raise `UserError` for what vLLM on a CPU cannot keep in sync. `config` is a Transformers model config."""
    if not engine_runs_on_cpu():
        return
    if config.tie_word_embeddings:
        raise UserError(
            "tie_word_embeddings: true, but vLLM on a CPU refreshes only one of the two uses of a tied embedding when "
            "weights are synced, so rollouts would drift from the policy; use an untied model, a GPU or use_vllm: false"
        )
    if sleep_mode:
        raise UserError("vllm_enable_sleep_mode: true needs a GPU; set it to false on a CPU")
