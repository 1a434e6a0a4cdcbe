"""The engines in this process, vLLM and Transformers.

Both get the same tokens, pixels and token bans; with tools the same turns as a rollout of a
training.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.requests import AnswerEngineSettings, AnswerRequest, Unanswerable
from adora_vl.rewards.thinking import opens_thinking
from adora_vl.rollout.rollouts import Rollout, SamplingRequest, SamplingResult
from adora_vl.rollout.turns import ToolLoop, append_result, run_turns
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Reply
from adora_vl.utils.seeding import rollout_seed

if TYPE_CHECKING:
    from vllm.config.model import ModelDType


class Conversations:
    """Answers requests by whoever samples tokens, in one turn or, where calls are answered, in
    several.
    """

    turns: ToolLoop | None = None

    def __init__(
        self,
        chat: ChatProcessor,
        sample: Callable[[Sequence[SamplingRequest]], list[SamplingResult]],
        longest: int,
        batch_size: int,
        *,
        ended: Callable[[Sequence[int]], bool] | None = None,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        """`longest`: tokens of an answer, with what tools say.

        `ended`: whether a turn has an end, for those who sample and do not say it. `any_rank`:
        whether something holds on any rank.
        """
        self.chat = chat
        self.sample = sample
        self.longest = longest
        self.batch_size = batch_size
        self._ended = ended
        self._any_rank = any_rank

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply | Unanswerable]:
        """One answer per request, in their order. Also of none: other ranks may have some."""
        chat = self.chat
        turns = self.turns
        turn = turns.turn_tokens if turns else None
        prompts = [chat.ids_of(request.messages, request.images) for request in requests]
        faults = [chat.overlong(ids, chat.context) for ids in prompts]

        def room(number: int, rollout: Rollout) -> int:
            left = min(self.longest, chat.context - len(prompts[number])) - len(rollout.tokens)
            return min(left, turn - len(rollout.last_turn_tokens)) if turn else left

        def asked(number: int, rollout: Rollout) -> SamplingRequest:
            seed = requests[number].seed
            spans = len(rollout.segments)
            seed = (
                rollout_seed(seed, position=f"segment-{spans}", group=0, member=0)
                if spans
                else seed
            )
            images = [*requests[number].images, *(picture.image for picture in rollout.pictures)]
            return SamplingRequest(
                prompt_ids=[*prompts[number], *rollout.tokens],
                images=images,
                group=number,
                seed=seed,
                max_tokens=room(number, rollout),
            )

        def ask(going: dict[int, Rollout]) -> dict[int, Rollout]:
            asks = [asked(number, rollout) for number, rollout in going.items()]
            return {
                number: append_result(
                    rollout,
                    request=one,
                    result=answer,
                    max_length=self.longest,
                    max_turn=turn,
                    has_ended=self._ended,
                )
                for (number, rollout), one, answer in zip(
                    going.items(), asks, self.sample(asks), strict=True
                )
            }

        def answered(number: int, rollout: Rollout) -> Rollout:
            seen = requests[number].images
            length = len(prompts[number])
            seed = str(requests[number].seed)
            return (
                turns(
                    rollout, seen, prompt_length=length, max_length=self.longest, step=0, seed=seed
                )
                if turns
                else rollout
            )

        begun = {number: Rollout() for number, fault in enumerate(faults) if fault is None}
        played = run_turns(
            begun,
            sample=ask,
            answer_calls=answered,
            has_room=lambda *one: room(*one) > 0,
            any_rank=self._any_rank if turns else bool,
        )
        return [
            self._reply(played[number], ids) if fault is None else Unanswerable(fault)
            for number, (ids, fault) in enumerate(zip(prompts, faults, strict=True))
        ]

    def _reply(self, rollout: Rollout, prompt: Sequence[int]) -> Reply:
        """The last turn is what is graded, as in a training."""
        by_calls = rollout.ended == "stop" or bool(rollout.calls and rollout.ended)
        names = ("name", "arguments", "text", "failed")
        calls = [{name: getattr(call, name) for name in names} for call in rollout.calls]
        turn = rollout.last_turn_tokens
        before = rollout.tokens[: len(rollout.tokens) - len(turn)]
        return Reply(
            self.chat.decode(turn),
            n_tokens=len(rollout.policy_tokens),
            finish_reason=rollout.ended if by_calls else "length",
            n_prompt_tokens=len(prompt),
            calls=tuple(calls) if self.turns else None,
            thinking_opened=opens_thinking([*prompt, *before], self.chat.decode),
        )


class _Local(Conversations):
    def __init__(
        self,
        settings: AnswerEngineSettings,
        chat: ChatProcessor,
        batch_size: int,
        sample: Callable[[Sequence[SamplingRequest]], list[SamplingResult]],
    ) -> None:
        super().__init__(chat, sample, settings.max_tokens, settings.batch_size or batch_size)
        self.resolved = chat.resolved(settings.dtype)
        if toolbox := settings.toolbox:
            self.turns = ToolLoop(
                tools=toolbox,
                processor=chat.processor,
                template=settings.template,
                tokens_of=chat.tokens_of,
                max_answers=settings.max_tool_calling_iterations,
                decode=chat.decode,
                turn_tokens=toolbox.options.turn_tokens,
                context_length=chat.context,
            )


class VLLMEngine(_Local):
    """vLLM in this process, which gets one image token per image."""

    def __init__(self, settings: AnswerEngineSettings) -> None:
        """Raises `UserError` if vLLM is not installed, or would compute this model differently from
        Transformers.
        """
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "engine: vllm is not installed; install it or use --engine transformers"
            )
        from adora_vl.rollout.engine_settings import machine_options
        from adora_vl.utils.launch import prepare_engine_environment

        prepare_engine_environment()  # before the import: vLLM reads its environment there
        from adora_vl.rollout.llm import PolicyLLM

        chat = ChatProcessor.of(settings)
        chat.check_vllm(settings.model, settings.dtype)
        longest = chat.context_needed(
            settings.max_images, settings.max_text_bytes, settings.max_tokens
        )
        shown = max(settings.max_images, settings.toolbox.options.images if settings.toolbox else 1)
        llm = PolicyLLM(
            model=settings.model,
            revision=settings.revision,
            dtype=cast("ModelDType", chat.dtype(settings.dtype)),
            max_model_len=longest,
            # On a CPU this is a share of the memory of the whole machine.
            gpu_memory_utilization=0.9 if torch.cuda.is_available() else 0.3,
            **machine_options(longest, 4096),
            limit_mm_per_prompt=None if chat.text_only else {"image": shown, "video": 0},
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
    """`model.generate` on left-padded batches.

    Slower than vLLM, but available wherever Transformers is.
    """

    def __init__(self, settings: AnswerEngineSettings) -> None:
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
        self._eos_ids: list[int] = (
            [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        )
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

    def _sampled(self, asks: Sequence[SamplingRequest]) -> list[SamplingResult]:
        if not asks:
            return []
        inputs = self.chat.inputs(
            [ask.prompt_ids for ask in asks], [image for ask in asks for image in ask.images]
        )
        torch.manual_seed(asks[0].seed or 0)
        with torch.inference_mode():
            longest = max(ask.max_tokens or self.longest for ask in asks)
            sequences_BT = self._model.generate(**inputs.to(self._device), max_new_tokens=longest)
        made = sequences_BT[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._answer(ids[: ask.max_tokens]) for ids, ask in zip(made, asks, strict=True)]

    def _answer(self, ids: list[int]) -> SamplingResult:
        """Up to and with the first end token.

        Without one it was cut off by the limit on its length.
        """
        end = next((i for i, token in enumerate(ids) if token in self._eos_ids), None)
        kept = ids if end is None else ids[: end + 1]
        return SamplingResult(kept, [None] * len(kept), "length" if end is None else "stop")
