"""TRL's generation class for vLLM, corrected for models with images.

Prompts, the weight sync, caches and settings differ from TRL's.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor, distributed
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from adora_vl.models.families import component_of, trainable_components
from adora_vl.models.four_bit import FrozenBase
from adora_vl.models.load import pixel_limits
from adora_vl.models.precision import dtype_name
from adora_vl.packing.image_store import ImageCache
from adora_vl.rollout.engine_settings import (
    EngineSettings,
    disable_tf32_of_float32_engine,
    engine_runs_on_cpu,
    engine_scores_raw,
    machine_options,
    refuse_on_cpu,
)
from adora_vl.rollout.prompt_tokens import check_prompts, never_sampled_ids
from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult
from adora_vl.rollout.server_group import ServerGroup
from adora_vl.rollout.servers import Client, ServerPool, connect
from adora_vl.rollout.weight_files import WeightFiles
from adora_vl.rollout.weight_sync import (
    adapter_tensors,
    lora_settings,
    merged_parameters,
    push_adapter,
    push_weights,
    reset_caches,
    runner_version,
    zero_scratch,
)
from adora_vl.utils import compat
from adora_vl.utils.errors import RolloutError, UserError, engine_call
from adora_vl.utils.launch import segments_expand

# makes the context in which an action of this name runs, and which counts its seconds
Timed = Callable[[str], AbstractContextManager[Any]]
LOOPS = "repetition_detection"  # vLLM's parameter that stops an answer which repeats itself


def _biases(logit_bias: Mapping[Any, Any]) -> dict[int, float]:
    """Return a `logit_bias` with the keys as numbers, since those of JSON are strings.

    Raises `UserError` where it is no mapping of token ids to numbers.
    """
    try:
        return {int(token): float(bias) for token, bias in logit_bias.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"generation_kwargs: logit_bias: {logit_bias!r} is no mapping of token ids to "
            'biases; give {"50": -1.0}'
        ) from error


class AdoraVLLMGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL is untyped to mypy
    """`trl.generation.VLLMGeneration`, corrected for Qwen2.5-VL with vLLM 0.31."""

    # vLLM's LoRA settings where a sync sends nothing but the adapter; None: merged tensors
    lora: Mapping[str, Any] | None = None

    def __init__(
        self, *args: Any, settings: EngineSettings, timed: Timed = nullcontext, **kwargs: Any
    ) -> None:
        """Build the engine, or connect to the servers, with TRL's arguments and ours.

        Args:
            args: those of stock TRL.
            settings: the settings that TRL has no field for.
            timed: makes the context that counts the seconds of a `sync`, `wake` or `sleep`.
            kwargs: those of stock TRL.

        Raises `UserError` for a `repetition_detection` or a `logit_bias` that vLLM does not take.
        """
        processing_class = kwargs["processing_class"]
        self.settings = settings
        self._timed = timed
        self.image_token_id: int | None = getattr(processing_class, "image_token_id", None)
        # False until a sync has sent every parameter
        self._engine_is_complete = False
        # by the last sync
        self.tensors_sent = 0
        self.bytes_sent = 0
        generation_kwargs = dict(kwargs.get("generation_kwargs") or {})
        self._config_kwargs = dict(generation_kwargs)
        banned = dict.fromkeys(
            never_sampled_ids(getattr(processing_class, "tokenizer", processing_class)), -100.0
        )
        if biases := _biases(generation_kwargs.get("logit_bias") or {}) | banned:
            generation_kwargs["logit_bias"] = biases
        # TRL reads nothing but token ids, so text is needed only to find strings to stop at.
        colocated = kwargs.get("mode", "colocate") == "colocate"
        if colocated and not generation_kwargs.get("stop"):
            generation_kwargs.setdefault("detokenize", False)
        if colocated and isinstance(generation_kwargs.get(LOOPS), dict):
            from adora_vl.rollout.llm import stopping_of_loops

            generation_kwargs[LOOPS] = stopping_of_loops(generation_kwargs[LOOPS])
        super().__init__(*args, **{**kwargs, "generation_kwargs": generation_kwargs})

    @property
    def four_bit(self) -> bool:
        """Whether the policy's base is in 4 bits.

        The engine then reads the base from the same folder, and a sync sends the adapter alone.
        """
        return bool(getattr(self.model, "is_loaded_in_4bit", False))

    def _init_vllm(self) -> None:
        """Build the engine, or connect to the servers.

        Stock TRL builds the `LLM` without a dtype or pixel limits, and knows one server, with an
        NCCL group. Ours adds the settings, and knows several servers, which get weights as files.
        Raises `UserError` for what the CPU engine cannot do.
        """
        folder = self.settings.weight_folder
        if self.mode == "colocate" or folder is not None:
            refuse_on_cpu(self.model.config, self.enable_sleep_mode)
        if self.mode == "server" and folder is not None:
            self._connect(Path(folder))
            return
        with (
            compat.ENGINE.replaced_by(self._build_llm, on=vllm_generation),
            compat.SERVER_CLIENT.replaced_by(Client, on=vllm_generation),
        ):
            super()._init_vllm()
        if self.mode == "colocate":
            self.llm.timed = self._timed
        elif self.mode == "server":
            servers = None
            if self.accelerator.is_main_process:
                servers = ServerPool(
                    [self.vllm_client],
                    patience_s=self.server_timeout,
                    answer_timeout_s=self.settings.answer_s,
                    vocabulary_size=self._vocabulary,
                )
            self.served = ServerGroup(self.accelerator, self._place_features, servers)

    def _connect(self, folder: Path) -> None:
        """Find the servers, which get their weights from files in `folder`."""
        self.served = ServerGroup(self.accelerator, self._place_features, None)
        if self.accelerator.is_main_process:
            urls = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            addresses = [url.strip() for url in urls.split(",")]
            patience_s = self.server_timeout
            clients = connect(addresses, self.group_port, patience_s)
            self.vllm_client: Any = clients[0]  # TRL asks it how log-probabilities are made
            self.served.servers = ServerPool(
                clients,
                patience_s=patience_s,
                answer_timeout_s=self.settings.answer_s,
                vocabulary_size=self._vocabulary,
                logprobs_mode=self._logprobs_mode(),
            )
            self.served.files = WeightFiles(folder, Path(self.settings.output_dir))
        # Servers with LoRA get the adapter alone, which a base in 4 bits requires; the others get
        # merged weights.
        if self.served.first_rank(ServerPool.have_lora) or self.four_bit:
            self.lora = lora_settings(self.model)
        lora = self.lora
        if lora is not None:
            base = self.model.name_or_path
            four_bit = self.four_bit
            self.served.first_rank(lambda servers: servers.take_adapter(lora, base, four_bit))
            if self.served.files is not None:
                self.served.files.adapter_rank = lora["max_lora_rank"]

    def _build_llm(self, **kwargs: Any) -> Any:
        """Build vLLM's engine from TRL's arguments and our settings, in place of TRL's `LLM(...)`."""
        # It imports vLLM, which only a colocated engine needs.
        from vllm.lora.request import LoRARequest

        from adora_vl.rollout.llm import LATER, PolicyLLM, has_copied_head, own_shared_memory

        settings = self.settings
        max_tokens = kwargs.get("max_model_len")
        if max_tokens is None:
            max_tokens = self.model.config.get_text_config().max_position_embeddings
        kwargs["dtype"] = settings.dtype or dtype_name(self.model.dtype)
        kwargs |= machine_options(
            max_tokens, settings.max_num_batched_tokens, settings.enforce_eager
        )
        kwargs["logprobs_mode"] = self._logprobs_mode()
        kwargs["revision"] = settings.revision
        frozen_base = None
        if self.four_bit:
            # It reads the folder that the policy was loaded from, and nothing else sends the base.
            kwargs["dtype"] = "bfloat16"
            self.lora = lora_settings(self.model)
            assert self.lora is not None  # `check_four_bit` takes nothing else
            kwargs |= {"max_loras": 1, **self.lora}
            if self.enable_sleep_mode:
                frozen_base = FrozenBase(self.model)
                frozen_base.move_to_host()
        elif self.enable_sleep_mode and not has_copied_head(self.model, kwargs["revision"]):
            # TRL puts it to sleep at once, which discards the weights, so none are read. But vLLM
            # gives a tied head weights of its own where the checkpoint has a copy of them, until it
            # has read both and found them equal.
            kwargs["load_format"] = LATER
        if self.tensor_parallel_size > 1 and segments_expand():
            # vLLM's own all-reduce shares the memory of its CUDA graphs by handles that growing
            # segments do not have: it ends the process (vLLM issue 42609).
            kwargs["disable_custom_all_reduce"] = True
        if self.image_token_id is not None:
            # vLLM reads the limits of the model's folder. With the trainer's own the two prompts
            # agree.
            kwargs["mm_processor_kwargs"] = pixel_limits(
                getattr(self.processing_class, "image_processor", None)
            )
            # otherwise vLLM reserves memory for a video
            kwargs["limit_mm_per_prompt"] = {"video": 0}
            if not settings.keeps_images:  # the trainer's cache has them already
                kwargs["mm_processor_cache_gb"] = 0
        divided_on_cpu = self.tensor_parallel_size > 1 and engine_runs_on_cpu()
        disable_tf32_of_float32_engine(str(kwargs["dtype"]))
        with own_shared_memory() if divided_on_cpu else nullcontext():
            llm = PolicyLLM(**kwargs)
        if self.four_bit:
            llm.adapter = LoRARequest("policy", 1, "in memory")
            llm.base = frozen_base
        return llm

    @property
    def _vocabulary(self) -> int:
        """The number of token ids that the policy has."""
        return int(self.model.config.get_text_config().vocab_size)

    def _logprobs_mode(self) -> str:
        """Return vLLM's name for the kind of log-probabilities that the trainer compares with.

        Stock TRL asks for log-probabilities after temperature, filters and bans, of which the
        trainer applies only the temperature. Where that is 1, ours asks for those before filters
        and bans, as the trainer computes them. Otherwise each token's ratio would lack the
        probability that the filters cut off.
        """
        raw = engine_scores_raw(self.temperature, self.repetition_penalty, self._config_kwargs)
        return "raw_logprobs" if raw else "processed_logprobs"

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that a sync sends, by name.

        Stock TRL yields every parameter, and merges LoRA in place and back out, which loses
        precision of bfloat16 weights with every sync. Ours leaves out the parts that cannot have
        changed, and merges a copy of one tensor at a time. The first sync sends everything, and so
        does each with sleep mode, whose level 2 discards the weights, and by NCCL, since TRL
        announces the tensors of the first pass every time. A server would leave a layer that came
        in part with uninitialised memory: so it gets whole parts.
        """
        trainable = trainable_components(self.model)
        by_nccl = self.mode == "server" and self.settings.weight_folder is None
        sends_all = not self._engine_is_complete or self.enable_sleep_mode or by_nccl

        def is_sent(name: str) -> bool:
            return sends_all or component_of(name) in trainable

        if is_peft_model(self.model) and not self._dist.is_fsdp:
            # A CPU engine, too, needs all tensors of a layer together.
            changed_only = not sends_all and self.mode == "colocate" and not engine_runs_on_cpu()
            for name, tensor in merged_parameters(
                self.model,
                gather=self._dist.gather_params,
                includes=is_sent,
                changed_only=changed_only,
            ):
                yield self._fix_param_name_to_vllm(name), tensor
            return
        if self._dist.is_fsdp:
            yield from (
                (name, tensor) for name, tensor in super()._iter_named_params() if is_sent(name)
            )
            return
        for name, parameter in self.model.named_parameters():
            if is_sent(name):
                with self._dist.gather_params([parameter]):
                    yield self._fix_param_name_to_vllm(name), parameter.data

    def sync_weights(self) -> None:
        """Send the policy's weights to the engine, and empty its caches.

        Stock TRL loads tensor by tensor, which the CPU engine's repacked layers refuse. It resets
        the prefix cache alone, so image features of the old vision tower stay in the encoder cache.
        Raises `EngineError` where the engine fails.
        """
        with self._timed("sync"), engine_call("the weight sync"):
            self._sync()

    def _sync(self) -> None:
        """Send the weights or the adapter, to the servers or the engine, and empty the caches."""
        if self.mode == "server":
            self._sync_servers()
            self._engine_is_complete = True
            return
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
            zero_scratch(self.llm)
        # Level 2 of sleep has discarded all weights.
        everything = self.enable_sleep_mode or not self._engine_is_complete
        if self.lora is not None:
            self.tensors_sent = push_adapter(self.llm, self._counted_tensors())
        else:
            self.tensors_sent = push_weights(self.llm, self._counted_tensors(), everything)
        self._engine_is_complete = True
        reset_caches(self.llm)

    def _sync_servers(self) -> None:
        """Send the weights to the servers: by NCCL, as TRL does, or as files."""
        if self.settings.weight_folder is None:
            self.bytes_sent = 0
            super().sync_weights()
            self.served.first_rank(ServerPool.reset_caches)
            return
        # everything where a server has not got the last sync: at the first one, or where it was started
        # again
        everything = bool(self.served.first_rank(lambda servers: servers.find_living()))
        with self.served.weights_written(self._tensors_for_servers(everything)) as folder:
            self.served.first_rank(lambda servers: servers.read_weights(folder))

    @contextmanager
    def weights_written(self, *, everything: bool) -> Iterator[Path]:
        """Write the policy's present weights; yields their folder, which exists inside the block.

        `everything`: all parameters; otherwise those that training can change.
        """
        with ExitStack() as stack:
            with self._timed("sync"), engine_call("the weight sync"):
                folder = stack.enter_context(
                    self.served.weights_written(self._tensors_for_servers(everything))
                )
            self._engine_is_complete = True
            yield folder

    def _tensors_for_servers(self, everything: bool) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors for servers; until they are read, a full sync is not complete."""
        if everything:
            self._engine_is_complete = False
        return self._counted_tensors()

    def _counted_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a sync sends, and count their bytes."""
        self.bytes_sent = 0
        if self.lora is None:
            tensors = self._iter_named_params()
        else:
            tensors = adapter_tensors(self.model, self._dist.gather_params)
        for name, tensor in tensors:
            self.bytes_sent += tensor.nbytes
            yield name, tensor

    @property
    def model_runner(self) -> str | None:
        """vLLM's model runner, V1 or V2; None for servers, where it is unknown."""
        return runner_version(self.llm) if self.mode == "colocate" else None

    def put_to_sleep(self) -> None:
        """Free the engine's memory, as TRL does after a generation.

        The next sync sends all weights again.
        """
        self.llm.sleep(level=2)
        self._llm_weights_sleeping = True

    def shut_down(self) -> None:
        """End a colocated engine, and let go of it. Nothing can be sampled after this.

        It is woken before: the memory that sleeps lies in a pool of vLLM's allocator, of which a
        process has one, and a second training of this process would find it there.
        """
        llm = self.llm
        if self.enable_sleep_mode:
            # what the last policy step has left in torch's cache is the engine's room
            vllm_generation.empty_cache()
            llm.wake_up()
        llm.llm_engine.engine_core.shutdown()
        if llm.base is not None:
            # the frozen base was away while the engine was awake
            llm.base.move_to_device()
        self.llm: Any = None
        del llm
        # the engine's parts refer to each other
        gc.collect()

    @contextmanager
    def staying_awake(self) -> Iterator[None]:
        """Keep a colocated engine awake between generations of one policy inside the block.

        So the weights are synced once for all of them. It sleeps at the end. Collective: all ranks
        enter together.
        """
        if self.mode != "colocate" or not self.enable_sleep_mode or self.llm.stays_awake:
            yield
            return
        try:
            with self.llm.awake():
                yield
        finally:
            self.put_to_sleep()

    def take_images_from(self, cache: ImageCache | None) -> None:
        """Put the trainer's cache before the image processor of a colocated engine.

        The processor is the engine's own object, not the trainer's.
        """
        if cache is not None and self.image_token_id is not None and self.mode == "colocate":
            processor = self.llm.renderer.get_mm_processor().info.get_hf_processor().image_processor
            compat.IMAGE_PROCESSING.install(cache.preprocess(processor), on=processor)

    def _place_features(
        self, features: dict[str, Any] | None, prompt_ids: list[int]
    ) -> dict[str, Any] | None:
        """Point a server's image features at the image tokens of the trainer's prompt.

        Stock TRL does it without comparing the numbers of features and tokens. Raises `RolloutError`
        where they differ: the server was started with other pixel limits.
        """
        placed: dict[str, Any] | None = super()._place_features(features, prompt_ids)
        if features is None or placed is None:
            return placed
        feature_counts = [image["length"] for image in features["mm_placeholders"]["image"]]
        token_counts = [image["length"] for image in placed["mm_placeholders"]["image"]]
        if feature_counts != token_counts:
            raise RolloutError(
                f"the server made {feature_counts} features for the images of a prompt with "
                f"{token_counts} image tokens; start it with the min_pixels and max_pixels of the "
                "training config (--mm-processor-kwargs)"
            )
        return placed

    def sample(
        self, requests: Sequence[SamplingRequest], settings: Mapping[str, Any] | None = None
    ) -> list[SamplingResult]:
        """Sample from the engine or the servers now, with the weights of the last sync.

        All ranks call it together, each with any number of requests. `settings`: vLLM's sampling
        parameters, by default those of the run.

        Raises `PromptMismatchError` for the first ask whose prompt the engine has read otherwise,
        else `EngineError`.
        """
        settings = dict(self.sampling if settings is None else settings)
        if self.mode == "server":
            with engine_call("generate"):
                return self.served.sample(self.served.gathered(requests, settings), len(requests))
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()  # sleep has discarded them
        with engine_call("generate"):
            results = self._sample_colocated(requests, settings)
        if self.image_token_id is not None:
            check_prompts(
                [request.prompt_ids for request in requests],
                [result.prompt_ids_read for result in results],
                self.image_token_id,
            )
        return results

    def _sample_colocated(
        self, requests: Sequence[SamplingRequest], settings: dict[str, Any]
    ) -> list[SamplingResult]:
        """Sample from the engine of this process, and return the results of this rank.

        Collective among the ranks that divide an engine: they all ask for the requests of all.
        """
        engine_requests = list(requests)
        first = 0
        if self.tensor_parallel_size > 1:
            requests_of_ranks: list[Any] = [None] * self.tensor_parallel_size
            distributed.all_gather_object(requests_of_ranks, engine_requests, group=self.tp_group)
            rank = distributed.get_rank(group=self.tp_group)
            first = sum(map(len, requests_of_ranks[:rank]))
            engine_requests = [request for part in requests_of_ranks for request in part]
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        if is_peft_model(self.model) and self.tensor_parallel_size > 1:
            # else vLLM's collective calls can meet the end of the adapter's (TRL issue 3671)
            distributed.barrier(device_ids=[self.accelerator.local_process_index])
        results: list[SamplingResult] = self.llm.sample(
            engine_requests, settings, self.image_token_id
        )
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = not self.llm.stays_awake
        return results[first : first + len(requests)]

    @property
    def sampling(self) -> dict[str, Any]:
        """vLLM's sampling parameters of the run, put together from TRL's keys as stock TRL does."""
        settings = {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
            **self.generation_kwargs,
        }
        if self.structured_outputs_regex is not None:
            settings["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return settings

    @property
    def greedy(self) -> dict[str, Any]:
        """vLLM's sampling parameters of an evaluation: the likeliest tokens, without filters."""
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        settings: dict[str, Any] = {
            "temperature": 0.0,
            "logprobs": 0,
            "max_tokens": self.max_completion_length,
        }
        settings["logit_bias"] = dict.fromkeys(never_sampled_ids(tokenizer), -100.0)
        if self.mode == "colocate":
            settings["detokenize"] = False
        return settings
