"""TRL's generation class for vLLM, corrected for models with images.

It builds the engine or connects to the servers, and samples. Its weight sync is in
`engine_weights.py`.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from torch import distributed
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from adora_vl.models.four_bit import FrozenBase
from adora_vl.models.precision import dtype_name
from adora_vl.packing.image_store import ImageCache
from adora_vl.rollout.engine_settings import (
    EngineSettings,
    banning_logit_bias,
    complete_generation_kwargs,
    disable_tf32_of_float32_engine,
    engine_runs_on_cpu,
    engine_scores_raw,
    image_options,
    machine_options,
    refuse_on_cpu,
)
from adora_vl.rollout.engine_weights import CountSeconds, SyncedVLLMGeneration
from adora_vl.rollout.prompt_tokens import check_prompts, never_sampled_ids
from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult
from adora_vl.rollout.server import AdapterRequirements
from adora_vl.rollout.server_client import Client, connect
from adora_vl.rollout.server_group import ServerGroup
from adora_vl.rollout.server_pool import ServerPool
from adora_vl.rollout.stopping import StopParameters
from adora_vl.rollout.weight_files import WeightFiles
from adora_vl.rollout.weight_sync import adapter_only_settings, runner_version
from adora_vl.utils import compat
from adora_vl.utils.errors import RolloutError, engine_call
from adora_vl.utils.launch import segments_expand


class AdoraVLLMGeneration(SyncedVLLMGeneration):
    """`trl.generation.VLLMGeneration`, corrected for models with images and vLLM 0.31.

    It builds vLLM's engine in each process (`mode: colocate`) or connects to servers (`server`),
    and samples from them with the policy's weights. In sleep mode a colocated engine frees its
    memory between two generations; at level 2 it discards its weights too. The first rank alone
    talks to servers, and `server_group` does so for all ranks.
    """

    def __init__(
        self,
        *args: Any,
        settings: EngineSettings,
        count_seconds: CountSeconds = nullcontext,
        **kwargs: Any,
    ) -> None:
        """Build the engine, or connect to the servers, with TRL's arguments and ours.

        Args:
            args: positional arguments of stock TRL.
            settings: settings of the engine that stock TRL has no argument for.
            count_seconds: returns a context that counts its seconds as those of an action, which
                is `sync`, `wake` or `sleep`.
            kwargs: keyword arguments of stock TRL.

        Raises `UserError` for a `repetition_detection` or a `logit_bias` that vLLM does not take.
        """
        processing_class = kwargs["processing_class"]
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self.settings = settings
        self._count_seconds = count_seconds
        self.image_token_id: int | None = getattr(processing_class, "image_token_id", None)
        self._engine_has_all_parameters = False  # whether a weight sync has sent every parameter
        self.bytes_sent = 0
        # As the config has them, without the bans that are added below. `_logprobs_mode` looks in
        # them for parameters that change the distribution.
        self._config_generation_kwargs = dict(kwargs.get("generation_kwargs") or {})
        generation_kwargs = complete_generation_kwargs(
            self._config_generation_kwargs,
            banned_ids=never_sampled_ids(tokenizer),
            is_colocated=kwargs.get("mode", "colocate") == "colocate",
        )
        super().__init__(*args, **{**kwargs, "generation_kwargs": generation_kwargs})

    @property
    def four_bit(self) -> bool:
        """Whether the policy's base model is quantised to 4 bits.

        The engine then reads the base from the same folder, and a sync sends only the adapter.
        """
        return bool(getattr(self.model, "is_loaded_in_4bit", False))

    def _init_vllm(self) -> None:
        """Build the engine, or connect to the servers.

        Stock TRL builds the `LLM` without a dtype or pixel limits, and knows one server, which gets
        weights by NCCL. Ours adds these settings, and knows several servers, which get weights as
        files. Raises `UserError` for what the CPU engine cannot do.
        """
        # Where servers read weights from files; None: one server gets them by NCCL.
        weight_folder = self.settings.weight_folder
        if self.mode == "colocate" or weight_folder is not None:
            refuse_on_cpu(self.model.config, sleep_mode=self.enable_sleep_mode)
        if self.mode == "server" and weight_folder is not None:
            self._connect(Path(weight_folder))
            return
        # TRL builds the engine and its client of a server by the names of their classes. Inside the
        # block these names stand for ours.
        with (
            compat.ENGINE.replaced_by(self._build_llm, on=vllm_generation),
            compat.SERVER_CLIENT.replaced_by(Client, on=vllm_generation),
        ):
            super()._init_vllm()
        if self.mode == "colocate":
            self.llm.count_seconds = self._count_seconds
        elif self.mode == "server":
            pool = None
            if self.accelerator.is_main_process:
                pool = self._server_pool([self.vllm_client])
            self.server_group = ServerGroup(self.accelerator, self._place_features, pool=pool)

    def _connect(self, weight_folder: Path) -> None:
        """Connect to the servers of a run that sends weights as files in `weight_folder`.

        The first rank alone talks to the servers, and has a `ServerPool`. All ranks get a
        `ServerGroup`, by which the first rank acts for all of them.
        """
        pool = None
        weight_files = None
        if self.accelerator.is_main_process:
            urls = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            addresses = [url.strip() for url in urls.split(",")]
            clients = connect(addresses, self.group_port, max_wait_s=self.server_timeout)
            self.vllm_client: Any = clients[0]  # TRL asks it how log-probabilities are made
            pool = self._server_pool(clients, logprobs_mode=self._logprobs_mode())
            weight_files = WeightFiles(weight_folder, Path(self.settings.output_dir))
        self.server_group = ServerGroup(
            self.accelerator, self._place_features, pool=pool, weight_files=weight_files
        )
        # Servers with LoRA get only the adapter; the others get weights with the adapter merged in.
        # A base in 4 bits cannot be merged, so its servers need LoRA, which the next call checks.
        if self.server_group.on_first_rank(ServerPool.all_have_lora) or self.four_bit:
            self.adapter_settings = adapter_only_settings(self.model)
        if self.adapter_settings is not None:
            self._expect_adapter(self.adapter_settings)

    def _server_pool(self, clients: Sequence[VLLMClient], logprobs_mode: str = "") -> ServerPool:
        """Return a pool of servers. Only the first rank has one.

        Args:
            clients: the HTTP clients of the servers.
            logprobs_mode: vLLM's name for the kind of log-probabilities that the trainer needs;
                empty where the servers were not asked for theirs.
        """
        return ServerPool(
            clients,
            max_wait_s=self.server_timeout,
            answer_timeout_s=self.settings.answer_timeout_s,
            vocabulary_size=int(self.model.config.get_text_config().vocab_size),
            logprobs_mode=logprobs_mode,
        )

    def _expect_adapter(self, lora_settings: Mapping[str, Any]) -> None:
        """Prepare weight files and servers for weight syncs that send only the adapter. Collective.

        Raises `EngineError` for a server that was not started with LoRA, or with another model.

        `lora_settings`: vLLM's LoRA settings that the policy's adapter needs.
        """
        requirements = AdapterRequirements(
            lora_settings=lora_settings,
            base_model=self.model.name_or_path,
            is_in_four_bit=self.four_bit,
        )
        self.server_group.on_first_rank(lambda pool: pool.expect_adapter(requirements))
        if self.server_group.weight_files is not None:
            self.server_group.weight_files.adapter_rank = lora_settings["max_lora_rank"]

    def _build_llm(self, **trl_options: Any) -> Any:
        """Build vLLM's engine in place of TRL's `LLM(...)`.

        `trl_options` are the arguments of TRL's call; those of the run's settings are added.
        """
        # It imports vLLM, which only a colocated engine needs.
        from vllm.lora.request import LoRARequest

        from adora_vl.rollout.llm import PolicyLLM, private_shared_memory

        options = {**trl_options, **self._llm_options(trl_options.get("max_model_len"))}
        frozen_base = None
        if self.four_bit and self.enable_sleep_mode:
            # The engine loads the base model in 4 bits too, and the GPU has memory for one copy of
            # it at a time. `PolicyLLM` moves the policy's copy back whenever the engine goes to
            # sleep.
            frozen_base = FrozenBase(self.model)
            frozen_base.move_to_host()
        disable_tf32_of_float32_engine(str(options["dtype"]))
        is_tensor_parallel = self.tensor_parallel_size > 1
        # On CPUs the processes of a tensor-parallel engine share memory, to which vLLM gives the
        # same name in every run on the machine.
        needs_private_memory = is_tensor_parallel and engine_runs_on_cpu()
        with private_shared_memory() if needs_private_memory else nullcontext():
            llm = PolicyLLM(**options)
        if self.four_bit:
            # vLLM requires a path, but the adapter comes with each weight sync.
            llm.adapter = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="in memory")
            llm.frozen_base = frozen_base
        return llm

    def _llm_options(self, max_model_length: int | None) -> dict[str, Any]:
        """Return the arguments of `LLM` that TRL leaves out or sets otherwise.

        `max_model_length`: TRL's limit for prompt and completion together; None: the model's own.
        """
        # It imports vLLM, which only a colocated engine needs.
        from adora_vl.rollout.llm import options_without_checkpoint

        settings = self.settings
        if max_model_length is None:
            max_model_length = self.model.config.get_text_config().max_position_embeddings
        options = machine_options(
            max_model_length,
            max_batched_tokens=settings.max_num_batched_tokens,
            eager=settings.enforce_eager,
        )
        options["dtype"] = settings.dtype or dtype_name(self.model.dtype)
        options["logprobs_mode"] = self._logprobs_mode()
        options["revision"] = settings.revision
        if self.four_bit:
            # `check_four_bit` refuses a policy with another dtype.
            options["dtype"] = "bfloat16"
            self.adapter_settings = adapter_only_settings(self.model)
            assert self.adapter_settings is not None, "`check_four_bit` lets only adapters pass"
            options |= {"max_loras": 1, **self.adapter_settings}
        elif self.enable_sleep_mode:
            # The first sync sends all weights, so vLLM need not read them from the checkpoint.
            options |= options_without_checkpoint(self.model, settings.revision)
        if self.tensor_parallel_size > 1 and segments_expand():
            # vLLM's own all-reduce shares the memory of its CUDA graphs by handles. Expandable
            # segments have none, and the process would end (vLLM issue 42609).
            options["disable_custom_all_reduce"] = True
        if self.image_token_id is not None:
            image_processor = getattr(self.processing_class, "image_processor", None)
            options |= image_options(image_processor, caches_images=settings.engine_caches_images)
        return options

    def _logprobs_mode(self) -> str:
        """Return vLLM's name for the kind of log-probabilities that it is to return.

        The trainer applies the temperature to its log-probabilities, but no filter (`top_p`, ...)
        and no ban of tokens. vLLM applies all of them ("processed", which stock TRL asks for) or
        none ("raw").

        - With temperature 1, no penalty and no bias ours asks for raw ones. They are the trainer's,
          while processed ones would differ by the probability that the filters cut off.
        - Otherwise ours asks for processed ones, since raw ones lack these changes.
        """
        is_raw = engine_scores_raw(
            self.temperature, self.repetition_penalty, self._config_generation_kwargs
        )
        return "raw_logprobs" if is_raw else "processed_logprobs"

    @property
    def model_runner(self) -> str | None:
        """vLLM's model runner, V1 or V2; None for servers, where it is unknown."""
        return runner_version(self.llm) if self.mode == "colocate" else None

    def put_to_sleep(self) -> None:
        """Free the engine's memory, as TRL does after a generation.

        It discards the weights, so the next sync sends all of them.
        """
        self.llm.sleep(level=2)
        self._llm_weights_sleeping = True  # TRL's flag, which `sample` reads

    def shut_down(self) -> None:
        """End a colocated engine, and free its memory. Nothing can be sampled after this.

        The engine is woken first. Memory that sleeps belongs to vLLM's allocator, of which a
        process has one, and would break the engine of a second training in this process.
        """
        llm = self.llm
        if self.enable_sleep_mode:
            # The engine needs the memory that the last policy step has left in torch's cache.
            vllm_generation.empty_cache()
            llm.wake_up()
        llm.llm_engine.engine_core.shutdown()
        if llm.frozen_base is not None:
            # While the engine is awake, the policy's frozen weights are on the host.
            llm.frozen_base.move_to_device()
        self.llm: Any = None
        del llm
        gc.collect()  # the parts of the engine refer to each other

    @contextmanager
    def staying_awake(self) -> Iterator[None]:
        """Keep a colocated engine awake inside the block, over several calls of `sample`.

        Without it an engine with sleep mode sleeps after each call, and needs another weight sync.
        It sleeps at the end of the block. Without sleep mode, on servers, and inside an outer block
        of this kind nothing is done. Collective: all ranks enter together.
        """
        if self.mode != "colocate" or not self.enable_sleep_mode or self.llm.is_kept_awake:
            yield
            return
        try:
            with self.llm.awake():
                yield
        finally:
            self.put_to_sleep()

    def take_images_from(self, cache: ImageCache | None) -> None:
        """Let a colocated engine take processed images from the trainer's cache.

        The engine has an image processor of its own. Its method `preprocess` is replaced by one
        that looks into the cache first. Nothing is done without a cache, for a text model, and on
        servers.
        """
        if cache is not None and self.image_token_id is not None and self.mode == "colocate":
            processor = self.llm.renderer.get_mm_processor().info.get_hf_processor().image_processor
            compat.IMAGE_PROCESSING.install(cache.make_preprocess(processor), on=processor)

    def _place_features(
        self, features: dict[str, Any] | None, prompt_ids: list[int]
    ) -> dict[str, Any] | None:
        """Return a server's image features with the positions of a prompt's image tokens.

        Stock TRL does not compare the numbers of features and tokens. Ours raises `RolloutError`
        where they differ, since the server was started with other pixel limits.

        Args:
            features: the server's features of the prompt's images; None for a text model.
            prompt_ids: the trainer's prompt, with one image token for each feature.
        """
        placed: dict[str, Any] | None = super()._place_features(features, prompt_ids)
        if features is None or placed is None:
            return placed
        # For each image, how many features it has, and how many image tokens in the prompt.
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
        """Sample a rollout for each request, with the weights of the last sync.

        All ranks call it together, each with any number of requests.

        Args:
            requests: the prompts of this rank.
            settings: vLLM's sampling parameters; None: those of the run.

        Raises `PromptMismatchError` for the first request whose prompt the engine has read
        differently, and `EngineError` where the engine fails.
        """
        settings = dict(self.sampling_settings if settings is None else settings)
        if self.mode == "server":
            with engine_call("generate"):
                return self.server_group.sample(requests, settings)
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()  # sleep has discarded the weights
        with engine_call("generate"):
            results = self._sample_colocated(requests, settings)
        if self.image_token_id is not None:
            check_prompts(
                trainer_prompts=[request.prompt_ids for request in requests],
                engine_prompts=[result.prompt_ids_read for result in results],
                image_token_id=self.image_token_id,
            )
        return results

    def _sample_colocated(
        self, requests: Sequence[SamplingRequest], settings: dict[str, Any]
    ) -> list[SamplingResult]:
        """Sample from the engine of this process, and return the results of this rank.

        With tensor parallelism several ranks share one engine, and each of them has to sample the
        requests of all of them, in the same order. For example, if rank 0 has 2 requests and rank 1
        has 3, both ranks sample all 5, and rank 1 returns the last 3 results. Collective among
        these ranks.

        Args:
            requests: the requests of this rank.
            settings: vLLM's sampling parameters.
        """
        engine_requests = list(requests)
        first_of_rank = 0  # the position of this rank's requests in `engine_requests`
        if self.tensor_parallel_size > 1:
            requests_by_rank: list[Any] = [None] * self.tensor_parallel_size  # filled below
            distributed.all_gather_object(requests_by_rank, engine_requests, group=self.tp_group)
            rank = distributed.get_rank(group=self.tp_group)
            first_of_rank = sum(map(len, requests_by_rank[:rank]))
            engine_requests = [request for of_rank in requests_by_rank for request in of_rank]
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])  # the weights are awake since the sync
        if is_peft_model(self.model) and self.tensor_parallel_size > 1:
            # Otherwise vLLM's collective calls can mix with the last ones of the adapter's sync
            # (TRL issue 3671).
            distributed.barrier(device_ids=[self.accelerator.local_process_index])
        results: list[SamplingResult] = self.llm.sample(
            engine_requests, settings, self.image_token_id
        )
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)  # `llm` ignores it inside `staying_awake`
            self._llm_weights_sleeping = not self.llm.is_kept_awake
        return results[first_of_rank : first_of_rank + len(requests)]

    @property
    def sampling_settings(self) -> dict[str, Any]:
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
    def greedy_settings(self) -> dict[str, Any]:
        """vLLM's sampling parameters of an evaluation: the likeliest tokens, without filters.

        An answer ends at the same strings and tokens as a rollout of the training. The policy was
        rewarded for the text up to there, and has never learned what comes after it.
        """
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        settings: dict[str, Any] = {
            "temperature": 0.0,
            "logprobs": 0,  # only the sampled token's, without further candidates
            "max_tokens": self.max_completion_length,
            "logit_bias": banning_logit_bias(never_sampled_ids(tokenizer)),
        }
        stop = StopParameters.from_config(self._config_generation_kwargs)
        settings |= stop.sampling
        if self.mode == "colocate" and not stop.strings:
            settings["detokenize"] = False  # nothing reads the text
        return settings
