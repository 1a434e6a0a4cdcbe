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
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.rollout.turns import ToolLoop, append_result, run_turns
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Reply
from adora_vl.utils.seeding import rollout_seed

if TYPE_CHECKING:
    from vllm.config.model import ModelDType


class Conversations:
    """Answers requests with a sampler of tokens, in one turn or, with tools, in several."""

    turns: ToolLoop | None = None
    """Answers the calls of tools; None where the model may call none."""

    def __init__(
        self,
        chat: ChatProcessor,
        sample: Callable[[Sequence[SamplingRequest]], list[SamplingResult]],
        longest: int,
        batch_size: int,
        *,
        stop: StopCriteria | None = None,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        """Set the sampler and its limits.

        Args:
            chat: Makes tokens of prompts, and text of answers.
            sample: Samples one turn for each request.
            longest: The tokens of an answer at most, with what tools say.
            batch_size: The number of requests that the caller should hand over at once.
            stop: Says whether a turn has an end, for a sampler that does not say why it stopped.
            any_rank: Whether something holds on any rank. Every rank has to call it, since with
                tools all of them sample as often as the one with the most turns.
        """
        self.chat = chat
        self.sample = sample
        self.longest = longest
        self.batch_size = batch_size
        self.stop = stop
        self.any_rank = any_rank

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply | Unanswerable]:
        """Return one answer per request, in their order.

        It is called with no requests too, since other ranks may have some.
        """
        chat = self.chat
        prompts = [chat.ids_of(request.messages, request.images) for request in requests]
        faults = [chat.overlong(ids, chat.context) for ids in prompts]
        begun = {number: Rollout() for number, fault in enumerate(faults) if fault is None}
        turns = ConversationTurns(engine=self, requests=requests, prompts=prompts)
        conversations = run_turns(begun, turns)
        replies: list[Reply | Unanswerable] = []
        for number, (ids, fault) in enumerate(zip(prompts, faults, strict=True)):
            if fault is None:
                replies.append(self._reply(conversations[number], ids))
            else:
                replies.append(Unanswerable(fault))
        return replies

    def _reply(self, rollout: Rollout, prompt: Sequence[int]) -> Reply:
        """Return the answer of a rollout, whose last turn is what is graded, as in a training."""
        finish_reason = rollout.finish_reason
        ended_by_tools = bool(rollout.calls and rollout.has_ended)
        # Without a call an answer that did not stop by itself was cut off, whatever cut it off.
        if finish_reason is not FinishReason.STOP and not ended_by_tools:
            finish_reason = FinishReason.LENGTH
        calls = []
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
        earlier_turns = rollout.tokens[: len(rollout.tokens) - len(last_turn)]
        return Reply(
            self.chat.decode(last_turn),
            n_tokens=len(rollout.policy_tokens),
            finish_reason=str(finish_reason),
            n_prompt_tokens=len(prompt),
            calls=tuple(calls) if self.turns else None,
            thinking_opened=opens_thinking([*prompt, *earlier_turns], self.chat.decode),
        )


@dataclass(frozen=True, kw_only=True)
class ConversationTurns:
    """Plays the turns of conversations, by the numbers of their requests: a `TurnPlayer`."""

    engine: Conversations
    requests: Sequence[AnswerRequest]
    prompts: Sequence[list[int]]
    """The token ids of each prompt."""

    def sample(self, rollouts: Mapping[int, Rollout]) -> dict[int, Rollout]:
        """Return the conversations with one more turn of the model."""
        tool_loop = self.engine.turns
        requests = [self._request(number, rollout) for number, rollout in rollouts.items()]
        results = self.engine.sample(requests)
        return {
            number: append_result(
                rollout,
                request,
                result,
                step=0,
                max_turn=tool_loop.turn_tokens if tool_loop else None,
                stop=self.engine.stop,
            )
            for (number, rollout), request, result in zip(
                rollouts.items(), requests, results, strict=True
            )
        }

    def answer(self, key: int, rollout: Rollout) -> Rollout:
        """Return the conversation with what tools answer to the calls of its last turn."""
        tool_loop = self.engine.turns
        if tool_loop is None:
            return rollout
        request = self.requests[key]
        return tool_loop(
            rollout,
            request.images,
            prompt_length=len(self.prompts[key]),
            max_length=self.engine.longest,
            step=0,
            seed=str(request.seed),
        )

    def has_room(self, key: int, rollout: Rollout) -> bool:
        """Return whether the conversation has room for more tokens."""
        return self._room(key, rollout) > 0

    def any_rank_continues(self, continues: bool) -> bool:
        """Return whether any rank wants another turn; without tools there is one turn."""
        return self.engine.any_rank(continues) if self.engine.turns else continues

    def _room(self, number: int, rollout: Rollout) -> int:
        """Return how many tokens the next turn of a conversation may have."""
        max_length = min(self.engine.longest, self.engine.chat.context - len(self.prompts[number]))
        room = max_length - len(rollout.tokens)
        tool_loop = self.engine.turns
        if tool_loop is not None and tool_loop.turn_tokens:
            room = min(room, tool_loop.turn_tokens - len(rollout.last_turn_tokens))
        return room

    def _request(self, number: int, rollout: Rollout) -> SamplingRequest:
        """Return the request for the next turn of a conversation."""
        request = self.requests[number]
        seed = request.seed
        segments = len(rollout.segments)
        if segments:  # a turn after the first has a seed of its own
            seed = rollout_seed(seed, position=f"segment-{segments}", group=0, member=0)
        return SamplingRequest(
            prompt_ids=[*self.prompts[number], *rollout.tokens],
            images=[*request.images, *(picture.image for picture in rollout.pictures)],
            group=number,
            seed=seed,
            max_tokens=self._room(number, rollout),
            max_length=self.engine.longest,
        )


class _Local(Conversations):
    """What both engines of this machine have in common: a model, its processor and its limits."""

    def __init__(
        self,
        settings: AnswerEngineSettings,
        chat: ChatProcessor,
        batch_size: int,
        sample: Callable[[Sequence[SamplingRequest]], list[SamplingResult]],
    ) -> None:
        """Begin with the tools of the settings, if they name any."""
        super().__init__(chat, sample, settings.max_tokens, settings.batch_size or batch_size)
        self.resolved = chat.resolved(settings.dtype)
        if toolbox := settings.toolbox:
            self.turns = ToolLoop(
                toolbox,
                chat.processor,
                settings.template,
                chat.tokens_of,
                settings.max_tool_calling_iterations,
                chat.decode,
                toolbox.options.turn_tokens,
                chat.context,
            )


class VLLMEngine(_Local):
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
        from adora_vl.utils.launch import prepare_engine_environment

        prepare_engine_environment()  # before the import: vLLM reads its environment there
        from adora_vl.rollout.llm import PolicyLLM

        chat = ChatProcessor.of(settings)
        chat.check_vllm(settings.model, settings.dtype)
        longest = chat.context_needed(
            settings.max_images, settings.max_text_bytes, settings.max_tokens
        )
        tool_images = settings.toolbox.options.images if settings.toolbox else 1
        max_images = max(settings.max_images, tool_images)
        dtype = chat.dtype(settings.dtype)
        disable_tf32_of_float32_engine(str(dtype))
        llm = PolicyLLM(
            model=settings.model,
            revision=settings.revision,
            dtype=cast("ModelDType", dtype),
            max_model_len=longest,
            # On a CPU this is a share of the memory of the whole machine.
            gpu_memory_utilization=0.9 if torch.cuda.is_available() else 0.3,
            **machine_options(longest, 4096),
            limit_mm_per_prompt=None if chat.text_only else {"image": max_images, "video": 0},
            mm_processor_kwargs=chat.pixel_limits or None,
            seed=settings.seed,
        )
        sampling = {
            "temperature": settings.temperature,
            "logit_bias": dict.fromkeys(chat.banned_ids, -100.0),
            "detokenize": False,  # decoded here, as for the other engine
        }
        super().__init__(
            settings,
            chat,
            256,
            partial(llm.sample, settings=sampling, image_token_id=chat.image_id),
        )


class TransformersEngine(_Local):
    """The engine by `model.generate` on left-padded batches.

    It is slower than vLLM, but available wherever Transformers is.
    """

    def __init__(self, settings: AnswerEngineSettings) -> None:
        """Load the model onto the GPU, or onto the CPU where there is none."""
        from transformers import GenerationConfig

        chat = ChatProcessor.of(settings)
        super().__init__(settings, chat, 64, self._sampled)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = chat.auto_class.from_pretrained(
            settings.model,
            revision=settings.revision,
            dtype=getattr(torch, chat.dtype(settings.dtype)),
            trust_remote_code=False,
        )
        self._model = model.to(self._device).eval()
        eos = model.generation_config.eos_token_id  # one, several or none
        self._eos_ids: list[int] = []
        if isinstance(eos, int):
            self._eos_ids = [eos]
        elif eos is not None:
            self._eos_ids = list(eos)
        # A fresh one, because `generate` fills in what is not given from the model's own:
        # Qwen2.5-VL's has a repetition penalty of 1.05, which vLLM (given explicit sampling
        # parameters) does not apply.
        sampled = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
        model.generation_config = GenerationConfig(
            eos_token_id=self._eos_ids,
            pad_token_id=chat.pad_id,
            suppress_tokens=chat.banned_ids or None,
            **(sampled if settings.temperature > 0 else {"do_sample": False}),
        )

    def _sampled(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Sample requests of about the same length as one batch, by the seed of the first."""
        if not requests:
            return []
        images = [image for request in requests for image in request.images]
        inputs = self.chat.inputs([request.prompt_ids for request in requests], images)
        torch.manual_seed(requests[0].seed or 0)
        with torch.inference_mode():
            max_tokens = max(request.max_tokens or self.longest for request in requests)
            sequences_BT = self._model.generate(
                **inputs.to(self._device), max_new_tokens=max_tokens
            )
        completions = sequences_BT[:, inputs["input_ids"].shape[1] :].tolist()
        return [
            self._answer(ids[: request.max_tokens])
            for ids, request in zip(completions, requests, strict=True)
        ]

    def _answer(self, ids: list[int]) -> SamplingResult:
        """Return the tokens up to the first end token and with it.

        Without one the answer was cut off by the limit on its length.
        """
        end = next((i for i, token in enumerate(ids) if token in self._eos_ids), None)
        completion = ids if end is None else ids[: end + 1]
        return SamplingResult(
            tokens=completion,
            logps=[None] * len(completion),
            finish_reason=FinishReason.LENGTH if end is None else FinishReason.STOP,
        )
