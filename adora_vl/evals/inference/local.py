"""The engines in this process, vLLM and Transformers.

Both get the same tokens, pixels and token bans; with tools the same turns as a rollout of a
training.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.requests import AnswerEngineSettings, AnswerRequest, Unanswerable
from adora_vl.rewards.thinking import opens_thinking
from adora_vl.rollout.rollouts import FinishReason, Rollout, SamplingRequest, SamplingResult
from adora_vl.rollout.stopping import StopCriteria, StopParameters, cut_behind_stop_string
from adora_vl.rollout.turns import ToolLoop, append_result, run_turns
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Reply
from adora_vl.utils.seeding import rollout_seed

if TYPE_CHECKING:
    from vllm.config.model import ModelDType


class ConversationEngine:
    """Answers requests with a sampler of tokens, in one turn or, with tools, in several."""

    tool_loop: ToolLoop | None = None
    """Answers the calls of tools; None where the model may call none."""

    def __init__(
        self,
        chat: ChatProcessor,
        sample: Callable[[Sequence[SamplingRequest]], list[SamplingResult]],
        max_length: int,
        batch_size: int,
        *,
        stop: StopCriteria | None = None,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        """Set the sampler and its limits.

        Args:
            chat: Turns prompts into tokens, and tokens into answers.
            sample: Samples one turn for each request.
            max_length: The most tokens of an answer, including the answers of tools in it.
            batch_size: The number of requests that the caller should hand over at once.
            stop: Decides whether a turn has ended, for a sampler that does not say it itself.
            any_rank: Returns whether its argument is true on any rank. It is a collective call:
                with tools all ranks sample as many turns as the rank with the most turns. For one
                process it is `bool`, which returns the argument.
        """
        self.chat = chat
        self.sample = sample
        self.max_length = max_length
        self.batch_size = batch_size
        self.stop = stop
        self.any_rank = any_rank
        self.context_length = chat.context_length

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply | Unanswerable]:
        """Return one answer per request, in their order.

        A prompt that does not fit the model's context is not asked. A rank without requests calls
        this function too, because other ranks may have some and `any_rank` is collective.
        """
        chat = self.chat
        prompts = [chat.prompt_ids(request.messages, request.images) for request in requests]
        # Why each prompt does not fit the model's context; None where it does.
        reasons = [chat.why_too_long(prompt_ids, self.context_length) for prompt_ids in prompts]
        # The conversations by the index of their request.
        started_rollouts = {
            index: Rollout() for index, reason in enumerate(reasons) if reason is None
        }
        turns = ConversationTurns(engine=self, requests=requests, prompts=prompts)
        finished_rollouts = run_turns(started_rollouts, turns, self.any_rank)
        replies: list[Reply | Unanswerable] = []
        for index, reason in enumerate(reasons):
            if reason is None:
                replies.append(self._build_reply(finished_rollouts[index], prompts[index]))
            else:
                replies.append(Unanswerable(reason))
        return replies

    def _build_reply(self, rollout: Rollout, prompt: Sequence[int]) -> Reply:
        """Turn a finished conversation into a reply, whose text is the last turn of the model.

        The last turn is what is graded, as in a training.

        Args:
            rollout: The turns of the model and the answers of tools.
            prompt: The token ids of the prompt.
        """
        finish_reason = rollout.finish_reason
        # A conversation with calls keeps its finish reason, such as a call too many. Without calls
        # an answer that did not stop by itself was cut off.
        ended_by_tools = bool(rollout.calls and rollout.has_ended)
        if finish_reason is not FinishReason.STOP and not ended_by_tools:
            finish_reason = FinishReason.LENGTH
        calls: list[dict[str, Any]] = []
        for call in rollout.calls:
            calls.append(
                {
                    "name": call.name,
                    "arguments": call.arguments,
                    "text": call.text,
                    "failed": call.failed,
                }
            )
        last_turn = rollout.last_turn_tokens
        tokens_before = rollout.tokens[: len(rollout.tokens) - len(last_turn)]
        return Reply(
            self.chat.decode(last_turn),
            n_tokens=len(rollout.policy_tokens),
            finish_reason=str(finish_reason),
            n_prompt_tokens=len(prompt),
            calls=tuple(calls) if self.tool_loop else None,
            # Whether the last turn begins inside a block of thinking, which its prompt opened.
            thinking_opened=opens_thinking([*prompt, *tokens_before], self.chat.decode),
        )


@dataclass(frozen=True, kw_only=True)
class ConversationTurns:
    """Samples the model's turns in conversations, and answers its calls of tools.

    It is the `TurnSampler` of `run_turns`. The key of a conversation is the index of its request.
    """

    engine: ConversationEngine
    requests: Sequence[AnswerRequest]
    prompts: Sequence[list[int]]
    """The token ids of each prompt."""

    def sample(self, rollouts: Mapping[int, Rollout]) -> dict[int, Rollout]:
        """Return the conversations with one more turn of the model."""
        tool_loop = self.engine.tool_loop
        max_turn_tokens = tool_loop.max_turn_tokens if tool_loop else None
        requests = [self._build_request(key, rollout) for key, rollout in rollouts.items()]
        results = self.engine.sample(requests)
        longer_rollouts: dict[int, Rollout] = {}
        for key, request, result in zip(rollouts, requests, results, strict=True):
            longer_rollouts[key] = append_result(
                rollouts[key],
                request,
                result,
                step=0,  # there is no training here
                max_turn_tokens=max_turn_tokens,
                stop_criteria=self.engine.stop,
            )
        return longer_rollouts

    def answer(self, key: int, rollout: Rollout) -> Rollout:
        """Return the conversation with the answers of tools to the calls of its last turn."""
        tool_loop = self.engine.tool_loop
        if tool_loop is None:
            return rollout
        request = self.requests[key]
        return tool_loop(
            rollout,
            request.images,
            prompt_length=len(self.prompts[key]),
            max_length=self.engine.max_length,
            step=0,  # there is no training here
            seed=str(request.seed),
        )

    def can_continue(self, key: int, rollout: Rollout) -> bool:
        """Return whether the conversation has room for more tokens."""
        return self._tokens_left(key, rollout) > 0

    def _tokens_left(self, key: int, rollout: Rollout) -> int:
        """Return how many tokens the next turn of a conversation may have.

        It is the least of three numbers: the tokens left of the length of an answer, of the model's
        context, and, with tools, of the length of a turn.
        """
        context_left = self.engine.context_length - len(self.prompts[key])
        tokens_left = min(self.engine.max_length, context_left) - len(rollout.tokens)
        tool_loop = self.engine.tool_loop
        if tool_loop is not None and tool_loop.max_turn_tokens:
            turn_left = tool_loop.max_turn_tokens - len(rollout.last_turn_tokens)
            tokens_left = min(tokens_left, turn_left)
        return tokens_left

    def _build_request(self, key: int, rollout: Rollout) -> SamplingRequest:
        """Build the request for the next turn of a conversation."""
        request = self.requests[key]
        seed = request.seed
        n_segments = len(rollout.segments)
        # Each turn after the first has its own seed. The seeds of two requests differ already, so
        # the numbers of a group and of a rollout in it can be 0.
        if n_segments:
            seed = rollout_seed(seed, draw_name=f"segment-{n_segments}", group=0, rollout_index=0)
        tool_images = [picture.image for picture in rollout.pictures]
        return SamplingRequest(
            prompt_ids=[*self.prompts[key], *rollout.tokens],
            images=[*request.images, *tool_images],
            merge_key=key,
            seed=seed,
            max_tokens=self._tokens_left(key, rollout),
            max_length=self.engine.max_length,
        )


class LocalEngine(ConversationEngine):
    """An engine in this process, which has a model, its processor and its limits."""

    def __init__(
        self,
        settings: AnswerEngineSettings,
        chat: ChatProcessor,
        default_batch_size: int,
        sample: Callable[[Sequence[SamplingRequest]], list[SamplingResult]],
    ) -> None:
        """Take the limits from the settings, and set up the tools if the settings have any."""
        super().__init__(
            chat,
            sample,
            max_length=settings.max_tokens,
            batch_size=settings.batch_size or default_batch_size,
        )
        # The settings of the engine that go into the fingerprint of a run.
        self.resolved_settings = chat.resolved_settings(settings.dtype)
        toolbox = settings.toolbox
        if toolbox is not None:
            self.tool_loop = ToolLoop(
                toolbox,
                processor=chat.processor,
                chat_template_kwargs=settings.chat_template_kwargs,
                count_image_tokens=chat.image_token_count,
                max_answers=settings.max_tool_calling_iterations,
                decode=chat.decode,
                max_turn_tokens=toolbox.options.turn_tokens,
                context_length=chat.context_length,
            )


class VLLMEngine(LocalEngine):
    """vLLM in this process, which gets one image token per image."""

    def __init__(self, settings: AnswerEngineSettings) -> None:
        """Start vLLM with the model of the settings.

        Raises `UserError` if vLLM is not installed, or would compute this model differently from
        Transformers.
        """
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "engine: vllm is not installed; install it or use --engine transformers"
            )
        from adora_vl.rollout.engine_settings import disable_tf32_of_float32_engine, machine_options
        from adora_vl.utils.launch import prepare_engine_environment, without_garbage_collection
        from adora_vl.utils.open_files import check_open_files

        check_open_files()
        prepare_engine_environment()  # before the import: vLLM reads its environment there
        with without_garbage_collection():
            from adora_vl.rollout.llm import PolicyLLM

        chat = ChatProcessor.from_settings(settings)
        chat.check_vllm(settings.model, settings.dtype)
        context_length = chat.required_context_length(
            settings.max_images,
            max_text_bytes=settings.max_text_bytes,
            max_tokens=settings.max_tokens,
        )
        # A tool may add images to a conversation.
        tool_images = settings.toolbox.options.images if settings.toolbox else 1
        max_images = max(settings.max_images, tool_images)
        dtype = chat.resolve_dtype(settings.dtype)
        disable_tf32_of_float32_engine(str(dtype))
        llm = PolicyLLM(
            model=settings.model,
            revision=settings.revision,
            dtype=cast("ModelDType", dtype),
            max_model_len=context_length,
            # On a CPU this is a share of the memory of the whole machine.
            gpu_memory_utilization=0.9 if torch.cuda.is_available() else 0.3,
            **machine_options(context_length, max_batched_tokens=4096),
            limit_mm_per_prompt=None if chat.text_only else {"image": max_images, "video": 0},
            mm_processor_kwargs=chat.pixel_limits or None,
            seed=settings.seed,
        )
        stop = settings.stop.sampling if settings.stop else {}
        sampling = {
            "temperature": settings.temperature,
            # A bias of -100 keeps a token from being sampled.
            "logit_bias": dict.fromkeys(chat.banned_ids, -100.0),
            # vLLM needs the text only to find strings that end an answer. `_build_reply` decodes.
            "detokenize": "stop" in stop,
            **stop,
        }
        super().__init__(
            settings,
            chat,
            default_batch_size=256,
            sample=partial(llm.sample, settings=sampling, image_token_id=chat.image_id),
        )


class TransformersEngine(LocalEngine):
    """The engine that uses `model.generate` on left-padded batches.

    It is slower than vLLM, but available wherever Transformers is.
    """

    def __init__(self, settings: AnswerEngineSettings) -> None:
        """Load the model onto the GPU, or onto the CPU where there is none."""
        from transformers import GenerationConfig

        chat = ChatProcessor.from_settings(settings)
        super().__init__(settings, chat, default_batch_size=64, sample=self._sample_batch)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = chat.auto_class.from_pretrained(
            settings.model,
            revision=settings.revision,
            dtype=getattr(torch, chat.resolve_dtype(settings.dtype)),
            trust_remote_code=False,
        )
        self._model = model.to(self._device).eval()
        # An answer ends at the tokenizer's end token too, as in a training and in vLLM. The
        # generation config may lack it.
        self._eos_ids = [chat.eos_id]
        config_eos = model.generation_config.eos_token_id  # one, several or none
        if isinstance(config_eos, int):
            self._eos_ids.append(config_eos)
        elif config_eos is not None:
            self._eos_ids += config_eos
        stop = settings.stop or StopParameters.from_config(None)
        self._eos_ids += stop.token_ids
        self._stop_strings = stop.strings
        decoding: dict[str, Any] = {"do_sample": False}
        if settings.temperature > 0:
            decoding = {
                "do_sample": True,
                "temperature": settings.temperature,
                # No filters: these two values switch them off.
                "top_k": 0,
                "top_p": 1.0,
            }
        # The config is a new one, because `generate` takes missing settings from the model's own
        # config. That of Qwen2.5-VL has a repetition penalty of 1.05, which vLLM does not apply.
        model.generation_config = GenerationConfig(
            eos_token_id=self._eos_ids,
            pad_token_id=chat.pad_id,
            suppress_tokens=chat.banned_ids or None,
            **decoding,
        )

    def _sample_batch(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Sample a completion of each request, all in one batch and by the seed of the first."""
        if not requests:
            return []
        images = [image for request in requests for image in request.images]
        inputs = self.chat.batch_inputs([request.prompt_ids for request in requests], images)
        torch.manual_seed(requests[0].seed or 0)
        # The batch is sampled up to the largest limit of a request. Smaller limits are applied
        # below.
        max_tokens = max(request.max_tokens or self.max_length for request in requests)
        stopping: dict[str, Any] = {}
        if self._stop_strings:
            stopping["stop_strings"] = list(self._stop_strings)
            stopping["tokenizer"] = self.chat.tokenizer
        with torch.inference_mode():
            # Token ids of shape (B, T): B requests, each with T tokens of prompt and completion.
            sequences_BT = self._model.generate(
                **inputs.to(self._device), max_new_tokens=max_tokens, **stopping
            )
        prompt_length = inputs["input_ids"].shape[1]  # with the padding, for all prompts
        completions = sequences_BT[:, prompt_length:].tolist()
        results: list[SamplingResult] = []
        for completion_ids, request in zip(completions, requests, strict=True):
            results.append(self._cut_at_end(completion_ids[: request.max_tokens]))
        return results

    def _cut_at_end(self, completion_ids: list[int]) -> SamplingResult:
        """Cut a completion of a batch off where it ends, and say why it ended.

        It ends after its first end-of-sequence token, or after the token that completes a stop
        string, whichever comes first; padding follows. A completion without either was cut off by
        the limit on its length.
        """
        ends: list[int] = []
        for index, token in enumerate(completion_ids):
            if token in self._eos_ids:
                ends.append(index + 1)
                break
        if self._stop_strings:
            string_end = cut_behind_stop_string(
                completion_ids, self._stop_strings, self.chat.decode
            )
            if string_end is not None:
                ends.append(string_end)
        tokens = completion_ids[: min(ends)] if ends else completion_ids
        return SamplingResult(
            tokens=tokens,
            logps=[None] * len(tokens),
            finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
        )
