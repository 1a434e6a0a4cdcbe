"""TRL's generation class for vLLM, with corrected prompts, weight sync, caches and settings for models with images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from adora_vl import compat
from adora_vl.errors import RolloutError, engine_call
from adora_vl.models.components import component_of, trainable_components
from adora_vl.models.load import pixel_limits
from adora_vl.rollout.engine_settings import EngineSettings
from adora_vl.rollout.image_cache import ImageCache
from adora_vl.rollout.lora import can_merge, merged_parameters
from adora_vl.rollout.noise import Noise
from adora_vl.rollout.sync import (
    engine_is_eager,
    engine_runs_on_cpu,
    prefill_options,
    push_weights,
    refuse_on_cpu,
    reset_caches,
    reset_server_encoder_cache,
)
from adora_vl.rollout.tokens import check_prompts, collapse_image_runs, never_sampled_ids
from adora_vl.seeds import rollout_seed


class AdoraVLLMGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL is untyped to mypy
    """`trl.generation.VLLMGeneration`, corrected where it is wrong for Qwen2.5-VL with vLLM 0.31."""

    def __init__(
        self,
        *args: Any,
        settings: EngineSettings,
        timed_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
        **kwargs: Any,
    ) -> None:
        """`timed_sync`: makes the context in which a weight sync runs, which counts its seconds."""
        processing_class = kwargs["processing_class"]
        self.settings, self._timed_sync = settings, timed_sync
        self.image_token_id: int | None = getattr(processing_class, "image_token_id", None)
        self._engine_is_complete = False  # nothing but the checkpoint on disk has reached the engine yet
        self.tensors_sent = self.bytes_sent = 0  # by the last sync
        self.position: tuple[int, str] | None = None  # the run's seed and where it stands; None: the engine's own seed
        self.image_cache: ImageCache | None = None  # where the engine's processor takes its images from
        self.group_requests = True
        self.noise: Noise | None = None  # how some of the rollouts' images are distorted
        self.distorted: list[bool] = []  # which of the last rows were sampled on distorted images
        generation_kwargs = dict(kwargs.get("generation_kwargs") or {})
        self._bans_only = not generation_kwargs  # the user's settings do not change what is sampled
        banned = dict.fromkeys(never_sampled_ids(getattr(processing_class, "tokenizer", processing_class)), -100.0)
        if banned:
            generation_kwargs["logit_bias"] = {**(generation_kwargs.get("logit_bias") or {}), **banned}
        # TRL reads the token ids alone. Strings to stop at are looked for in the text, so with them text is made.
        if kwargs.get("mode", "colocate") == "colocate" and not generation_kwargs.get("stop"):
            generation_kwargs.setdefault("detokenize", False)
        super().__init__(*args, **{**kwargs, "generation_kwargs": generation_kwargs})

    def _init_vllm(self) -> None:
        """Stock TRL builds the `LLM` without a dtype or pixel limits; ours adds them to the same call. Raises
        `UserError` for what the CPU engine cannot do.
        """
        if self.mode == "colocate":
            refuse_on_cpu(self.model.config, self.enable_sleep_mode)
        with compat.ENGINE.replaced_by(self._build_llm, on=vllm_generation):
            super()._init_vllm()

    def _build_llm(self, **kwargs: Any) -> Any:
        from adora_vl.rollout.llm import GroupingLLM  # imports vLLM, which only a colocated engine needs

        settings = self.settings
        kwargs["dtype"] = settings.dtype or str(self.model.dtype).removeprefix("torch.")
        longest = kwargs.get("max_model_len") or self.model.config.get_text_config().max_position_embeddings
        kwargs |= prefill_options(longest, settings.max_num_batched_tokens)
        kwargs |= {"enforce_eager": engine_is_eager(settings.enforce_eager), "logprobs_mode": self._logprobs_mode()}
        kwargs["revision"] = settings.revision
        if self.image_token_id is not None:
            # vLLM reads the limits of the model's folder. With the trainer's own the two prompts agree.
            kwargs["mm_processor_kwargs"] = pixel_limits(getattr(self.processing_class, "image_processor", None))
            kwargs["limit_mm_per_prompt"] = {"video": 0}  # otherwise vLLM reserves memory for a video
            if not settings.keeps_images:  # the trainer's cache has them already
                kwargs["mm_processor_cache_gb"] = 0
        return GroupingLLM(**kwargs)

    def _logprobs_mode(self) -> str:
        """Stock TRL asks for log-probabilities after temperature, filters and bans, of which the trainer applies only
        the temperature. Where nothing but the bans changes the sampling, ours asks for those before the bans, which
        are the same as the trainer's.
        """
        neutral = (self.temperature, self.top_p, self.repetition_penalty) == (1.0, 1.0, 1.0)
        unfiltered = not self.top_k or self.top_k < 0
        plain = neutral and unfiltered and not self.min_p and self._bans_only
        return "raw_logprobs" if plain else "processed_logprobs"

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Stock TRL yields every parameter, and merges LoRA in place and back out, which wears bfloat16 weights down.

        Ours leaves out the parts that cannot have changed, and merges a copy of one tensor at a time. The first sync
        sends everything, and so does every sync with sleep mode, whose level 2 discards the weights.
        """
        trainable = trainable_components(self.model)
        everything = not self._engine_is_complete or self.enable_sleep_mode

        def wanted(name: str) -> bool:
            return everything or component_of(name) in trainable

        if is_peft_model(self.model) and not self._dist.is_fsdp and can_merge(self.model):
            # A CPU engine needs all tensors of a layer together, so it gets whole components.
            changed_only = not everything and not engine_runs_on_cpu()
            for name, tensor in merged_parameters(self.model, self._dist.gather_params, wanted, changed_only):
                yield self._fix_param_name_to_vllm(name), tensor
            return
        if is_peft_model(self.model) or self._dist.is_fsdp:
            yield from ((name, tensor) for name, tensor in super()._iter_named_params() if wanted(name))
            return
        for name, parameter in self.model.named_parameters():
            if wanted(name):
                with self._dist.gather_params([parameter]):
                    yield self._fix_param_name_to_vllm(name), parameter.data

    def sync_weights(self) -> None:
        """Stock TRL loads tensor by tensor, which the CPU engine's repacked layers refuse, and resets the prefix
        cache alone, which leaves image features of the old vision tower in the encoder cache.

        Raises `EngineError` where the engine fails.
        """
        with self._timed_sync(), engine_call("the weight sync"):
            self._sync()

    def _sync(self) -> None:
        if self.mode == "server":
            super().sync_weights()
            self._engine_is_complete = True
            if self.accelerator.is_main_process:
                reset_server_encoder_cache(self.vllm_client)
            return
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self.bytes_sent = 0
        self.tensors_sent = push_weights(self.llm, self._counted(self._iter_named_params()))
        self._engine_is_complete = True
        reset_caches(self.llm)

    def _counted(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.bytes_sent += tensor.nbytes
            yield name, tensor

    def prepare(
        self,
        position: tuple[int, str] | None,
        images: ImageCache | None,
        group_requests: bool,
        noise: Noise | None = None,
    ) -> None:
        """Say how the next rollouts are sampled.

        `position`: the run's seed and where the run stands; None samples from the engine's own seed. `images`: the
        cache from which the engine's image processor takes processed images. `group_requests`: whether a prompt is
        one request. `noise`: how the images of some rollouts are distorted.
        """
        self.position, self.image_cache, self.group_requests, self.noise = position, images, group_requests, noise

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """Yields the colocated `vllm.LLM` with the policy's present weights. All ranks call it together.

        TRL syncs the weights again before the next rollouts, as after every step.
        """
        self.sync_weights()
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        try:
            yield self.llm
        finally:
            if self.enable_sleep_mode:
                self.put_to_sleep()

    def put_to_sleep(self) -> None:
        """Free the engine's memory, as TRL does after a generation. The next sync sends all weights again."""
        self.llm.sleep(level=2)
        self._llm_weights_sleeping = True

    @contextmanager
    def sampling(
        self,
        *,
        position: tuple[int, str] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        **further: Any,
    ) -> Iterator[None]:
        """Inside, rollouts are sampled with these settings instead of those of the run. None leaves a setting as it is.

        `position` as in `prepare`. `further`: vLLM's sampling parameters, beside those of `generation_kwargs`.
        """
        asked = {
            "position": position,
            "max_completion_length": max_tokens,
            "temperature": temperature,
            "generation_kwargs": {**self.generation_kwargs, **further},
        }
        lent = {name: value for name, value in asked.items() if value is not None}
        kept = {name: getattr(self, name) for name in lent}
        self.__dict__.update(lent)
        try:
            yield
        finally:
            self.__dict__.update(kept)

    def _place_features(self, features: dict[str, Any] | None, prompt_ids: list[int]) -> dict[str, Any] | None:
        """Stock TRL moves a server's image features to the trainer's image tokens without comparing their numbers.

        Raises `RolloutError` where they differ: the server was started with other pixel limits.
        """
        placed: dict[str, Any] | None = super()._place_features(features, prompt_ids)
        if features is not None and placed is not None:
            theirs, ours = ([p["length"] for p in f["mm_placeholders"]["image"]] for f in (features, placed))
            if theirs != ours:
                raise RolloutError(
                    f"the server made {theirs} features for the images of a prompt with {ours} image tokens; start it "
                    "with the min_pixels and max_pixels of the training config (--mm-processor-kwargs)"
                )
        return placed

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[Any, ...]:
        """Stock TRL sends colocated vLLM expanded image tokens beside the image, and vLLM expands them again.

        Ours sends one token per image and checks that the engine arrives at the trainer's own ids. Server mode pairs
        expanded ids with features that the server has made, so there the prompts stay as they are.

        The engine's log-probabilities of a rollout on a distorted image do not belong to the trainer's image, so they
        are replaced by None, which becomes NaN. TRL and ours leave such tokens out of the ratio and of the drift.

        Raises `PromptMismatchError` for the first row that differs, and `EngineError` where the engine fails.
        """
        image_token_id = self.image_token_id
        self.distorted = [False] * len(prompts)
        if self.mode == "server":
            with engine_call("generate"):
                return tuple(super().generate(prompts, images, num_generations, profiler))
        if image_token_id is None:
            with self._asking_once(len(prompts), num_generations), engine_call("generate"):
                return tuple(super().generate(prompts, images, num_generations, profiler))
        collapsed = [collapse_image_runs(ids, image_token_id) for ids in prompts]
        if self.noise is not None and images is not None:
            first = self.accelerator.process_index * len(prompts)
            image_processor = getattr(self.processing_class, "image_processor", None)
            images, self.distorted = self.noise.applied(images, first, num_generations, image_processor)
        with self._asking_once(len(prompts), num_generations), self._images_from_cache(), engine_call("generate"):
            prompt_ids, completion_ids, logps, *rest = super().generate(collapsed, images, num_generations, profiler)
        check_prompts(prompts, prompt_ids, image_token_id)
        if any(self.distorted):
            logps = [
                [[None] * len(token) for token in row] if distorted else row
                for row, distorted in zip(logps, self.distorted, strict=True)
            ]
        return (prompt_ids, completion_ids, logps, *rest)

    @contextmanager
    def _asking_once(self, rows: int, num_generations: int) -> Iterator[None]:
        """Inside, the rollouts of a prompt are one request, and each is sampled from a seed of its own. Stock TRL sends
        one request per rollout and samples from the random state of the process. A checkpoint restores that state
        too, but a rollout then depends on everything that was drawn before it.

        With tensor parallelism the ranks of one engine ask for the rows of all of them, and so for the same.
        """
        ranks = self.tensor_parallel_size
        first = self.accelerator.process_index // ranks * ranks * rows
        places = [divmod(first + row, num_generations) for row in range(ranks * rows)]
        seeds = None
        if self.position is not None:
            seeds = [rollout_seed(*self.position, group, member) for group, member in places]
        groups = [group for group, _ in places]
        with self.llm.asking(groups, seeds, self.group_requests):
            yield

    def _images_from_cache(self) -> Any:
        """Inside, the engine's image processor asks the trainer's cache first."""
        if self.image_cache is None or self.image_token_id is None:
            return nullcontext()
        processor = self.llm.renderer.get_mm_processor().info.get_hf_processor().image_processor
        return compat.IMAGE_PROCESSING.replaced_by(self.image_cache.preprocess(processor), on=processor)
