"""What vLLM is asked for, with which prompts, options and tokens, without starting an engine."""

import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from PIL import Image
from torch import distributed, nn
from transformers import GenerationConfig

from adora_vl.data.shared_images import as_image_with_digest
from adora_vl.rollout import engine_settings as sync
from adora_vl.rollout import prompt_tokens
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import EngineSettings
from adora_vl.rollout.rollouts import FinishReason, SamplingRequest, SamplingResult, merge_requests
from adora_vl.rollout.server import sampled_logps
from adora_vl.utils.errors import RolloutError, UserError
from adora_vl.utils.launch import prepare_engine_environment
from tests.support.sampling_requests import sampling_requests
from tests.support.stand_ins import settings_of_engine

prepare_engine_environment()

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.device_communicators import cpu_communicator  # noqa: E402
from vllm.logprobs import FlatLogprobs, Logprob  # noqa: E402
from vllm.multimodal.hasher import MultiModalHasher  # noqa: E402
from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids  # noqa: E402
from vllm.multimodal.processing.inputs import ProcessorInputs  # noqa: E402
from vllm.v1.core.sched.utils import check_sequence_repetition  # noqa: E402

from adora_vl.rollout import llm as llm_module  # noqa: E402
from adora_vl.rollout.llm import PolicyLLM, logps_of_tokens, with_image_digests  # noqa: E402

# Sampling parameters with which the policy samples by its own probabilities.
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
# Ids of the image token, and of the tokens before and after an image.
IMAGE = 90
START = 91
END = 92


@pytest.mark.parametrize("candidates", [1, 3])
@pytest.mark.parametrize("special_value", [-0.5, float("nan"), float("-inf")])
def test_flat_log_probabilities_are_read_as_those_of_one_mapping_a_position(
    candidates, special_value
):
    """vLLM's two formats give the same values, and one that is no finite number is -inf.

    With more candidates than one, likelier tokens than the sampled one stand before it.
    """
    tokens = [5, 7, 5]
    values = [-1.5, special_value, -2.0]
    positions = []
    for token, value in zip(tokens, values, strict=True):
        likelier = {100 + rank: Logprob(-0.1 * rank) for rank in range(1, candidates)}
        positions.append({**likelier, token: Logprob(value)})
    flat = FlatLogprobs()
    flat.extend(positions)
    expected = [value if math.isfinite(value) else -math.inf for value in values]

    assert logps_of_tokens(positions, tokens) == expected
    assert logps_of_tokens(flat, tokens) == expected


def test_log_probabilities_are_the_trainers_own_where_tokens_are_only_left_out(subtests):
    """The engine gives raw log-probabilities unless an option changes those of kept tokens.

    Bans and filters only leave tokens out, which the trainer's log-probabilities do not know.
    vLLM's processed ones are larger by what was cut off, and no ratio to the trainer's would be
    right. A temperature, a penalty and a bias change the probabilities themselves.
    """
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "raw_logprobs"),
        ({"top_k": -1, "min_p": 0.0}, "raw_logprobs"),
        ({"top_p": 0.9}, "raw_logprobs"),
        ({"top_k": 20}, "raw_logprobs"),
        ({"min_p": 0.1}, "raw_logprobs"),
        ({"_config_generation_kwargs": {"stop": ["x"], "bad_words": ["y"]}}, "raw_logprobs"),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"repetition_penalty": 1.05}, "processed_logprobs"),
        ({"_config_generation_kwargs": {"logit_bias": {5: 1.0}}}, "processed_logprobs"),
    ]
    for sampling, expected_mode in cases:
        with subtests.test(str(sampling)):
            engine = object.__new__(AdoraVLLMGeneration)
            engine.__dict__.update({**NEUTRAL, "_config_generation_kwargs": {}, **sampling})
            assert engine._logprobs_mode() == expected_mode


def test_the_log_probability_of_a_token_is_that_of_its_own_id():
    """The log-probability of a sampled token is found by its id among the candidates.

    A server's reply has likelier candidates first: here token 9 before the sampled 7.
    """
    tokens = [[7, 8]]
    logps = [[[-0.1, -2.0], [-0.5]]]
    ids = [[[9, 7], [8]]]
    assert sampled_logps(tokens, logps, ids) == [[-2.0, -0.5]]


def test_shared_memory_has_a_name_of_its_own_and_no_name_after_the_start(tmp_path, monkeypatch):
    """The shared memory of a run has a name of its own, and its file is gone after the start.

    With vLLM's own name two runs on a machine would share memory and leave it behind. Files of
    others stay.
    """
    monkeypatch.setattr(llm_module, "_SHARED_MEMORY_FOLDER", tmp_path)
    monkeypatch.setenv("VLLM_DIST_IDENT", "a-run")
    (tmp_path / "other").touch()
    with llm_module.private_shared_memory():
        ranks: Any = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
        name = cpu_communicator._CPUSHMDistributed.make_group_name(ranks)
        (tmp_path / name.removeprefix("/")).touch()
    assert str(os.getppid()) in name
    assert [file.name for file in tmp_path.iterdir()] == ["other"]


def engine_with_generation_kwargs(
    generation_kwargs: dict[str, Any] | None, mode: str = "colocate"
) -> AdoraVLLMGeneration:
    """Return the trainer's object for vLLM with these `generation_kwargs`.

    A test replaces `_init_vllm`, which would start an engine.
    """
    tokenizer = SimpleNamespace(get_vocab=lambda: {})
    required_arguments = {
        "model": None,
        "accelerator": Accelerator(cpu=True),
        "processing_class": tokenizer,
    }
    return AdoraVLLMGeneration(
        **required_arguments,
        mode=mode,
        generation_kwargs=generation_kwargs,
        settings=settings_of_engine(),
    )


def test_rollouts_are_not_turned_into_text_by_the_engine_unless_it_stops_at_a_string(
    monkeypatch, subtests
):
    """The trainer reads tokens alone, so vLLM's option `detokenize` is off to save its time."""
    monkeypatch.setattr(AdoraVLLMGeneration, "_init_vllm", lambda self: None)
    # (mode, the run's `generation_kwargs`, what vLLM gets for `detokenize`; None: its default,
    # True)
    cases: list[Any] = [
        ("colocate", None, False),
        ("colocate", {"top_k": 3}, False),
        ("colocate", {"stop": ["</answer>"]}, None),  # vLLM looks for the string in the text
        ("colocate", {"detokenize": True}, True),
        ("server", None, None),
    ]
    for mode, generation_kwargs, detokenize in cases:
        with subtests.test(f"{mode} {generation_kwargs}"):
            engine = engine_with_generation_kwargs(generation_kwargs, mode)
            assert engine.generation_kwargs.get("detokenize") is detokenize
            # vLLM refuses strings to stop at without a text
            SamplingParams(**engine.generation_kwargs)


def test_an_evaluation_ends_answers_where_a_rollout_ends(monkeypatch):
    """An evaluation answers greedily, and stops at the tokens and strings of the run.

    vLLM looks for strings in the text alone, so with any of them it has to decode the answer.
    """
    monkeypatch.setattr(AdoraVLLMGeneration, "_init_vllm", lambda self: None)
    plain = engine_with_generation_kwargs({}).greedy_settings
    assert plain["detokenize"] is False
    assert "stop" not in plain
    stopping = engine_with_generation_kwargs(
        {"stop": "</answer>", "stop_token_ids": [7]}
    ).greedy_settings
    assert stopping["stop"] == ["</answer>"]
    assert stopping["stop_token_ids"] == [7]
    assert "detokenize" not in stopping
    assert SamplingParams(**stopping).stop == ["</answer>"]


def test_an_answer_that_repeats_itself_can_be_stopped_by_a_key_of_the_config(monkeypatch):
    """vLLM gets its option `repetition_detection` from the key `generation_kwargs`.

    A value that vLLM would not take is refused in one line.
    """
    monkeypatch.setattr(AdoraVLLMGeneration, "_init_vllm", lambda self: None)
    engine = engine_with_generation_kwargs(
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}}
    )
    parameters = SamplingParams(**engine.generation_kwargs).repetition_detection

    assert parameters is not None
    assert parameters.max_pattern_size == 2
    assert check_sequence_repetition([7, 1, 2, 1, 2, 1, 2], parameters), "1, 2 three times"
    assert not check_sequence_repetition([7, 1, 2, 1, 2, 1], parameters)
    assert engine._logprobs_mode() == "raw_logprobs", "each token is sampled as without it"
    for wrong, message in (
        ({"max_pattern_size": 2}, ": {'max_pattern_size': 2} is not taken by vLLM .*such as"),
        ({"max_pattern_size": "x"}, ".max_pattern_size: 'x' is not a whole number"),
        ({"max_pattern_size": 2, "count": 2}, ": unknown option 'count', .*mean 'min_count'"),
    ):
        key = "generation_kwargs: repetition_detection"
        with pytest.raises(UserError, match=f"^{key}{message}") as refused:
            engine_with_generation_kwargs({"repetition_detection": wrong})
        assert "\n" not in str(refused.value)


def test_a_bias_from_the_command_line_has_texts_as_its_tokens(monkeypatch):
    """The token ids of a `logit_bias` may be texts, as JSON has them; vLLM gets numbers."""
    monkeypatch.setattr(AdoraVLLMGeneration, "_init_vllm", lambda self: None)
    engine = engine_with_generation_kwargs(json.loads('{"logit_bias": {"50": 2.0}}'))
    assert SamplingParams(**engine.generation_kwargs).logit_bias == {50: 2.0}
    for wrong in ({"yes": 2.0}, {"50": "much"}, [50]):
        with pytest.raises(
            UserError, match="^generation_kwargs: logit_bias: .* is no mapping of token ids"
        ):
            engine_with_generation_kwargs({"logit_bias": wrong})


def vllm_arguments(
    monkeypatch: pytest.MonkeyPatch, settings: EngineSettings, ranks: int = 1
) -> Any:
    """Return the keyword arguments with which `LLM` of vLLM would be built.

    `ranks`: how many ranks divide the engine.
    """
    monkeypatch.setattr(llm_module, "PolicyLLM", lambda **arguments: arguments)
    engine = object.__new__(AdoraVLLMGeneration)
    model = SimpleNamespace(dtype=torch.float32)
    engine.__dict__.update(
        NEUTRAL,
        model=model,
        image_token_id=None,
        _config_generation_kwargs={},
        enable_sleep_mode=False,
    )
    engine.settings = settings
    engine.tensor_parallel_size = ranks
    return engine._build_llm(max_model_len=64)


def test_by_default_the_engine_compiles_on_a_gpu_alone(monkeypatch, subtests):
    """The key `enforce_eager` decides; by default an engine on a CPU is eager."""
    # (the key `enforce_eager`, whether the engine is on a CPU, whether it does not compile)
    cases = [
        (None, True, True),
        (None, False, False),
        (False, True, False),
        (True, False, True),
    ]
    for configured, on_cpu, is_eager in cases:
        with subtests.test(f"{configured} {on_cpu}"):
            monkeypatch.setattr(sync, "engine_runs_on_cpu", lambda on_cpu=on_cpu: on_cpu)
            assert (
                vllm_arguments(monkeypatch, settings_of_engine(enforce_eager=configured))[
                    "enforce_eager"
                ]
                is is_eager
            )


def test_a_divided_engine_leaves_the_all_reduce_to_nccl_where_memory_segments_grow(
    monkeypatch, subtests
):
    """An engine on several ranks is built without vLLM's all-reduce under `expandable_segments`.

    vLLM's own all-reduce would end the process there.
    """
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    # (ranks that divide the engine, torch's setting, whether vLLM's all-reduce is off; None:
    # default)
    for ranks, setting, is_disabled in [
        (2, "expandable_segments:True", True),
        (2, "", None),
        (1, "expandable_segments:True", None),
    ]:
        with subtests.test(f"{ranks} {setting}"):
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
            arguments = vllm_arguments(monkeypatch, settings_of_engine(), ranks)
            assert arguments.get("disable_custom_all_reduce") is is_disabled


def expand_images(token_ids: list[int]) -> list[int]:
    """Return a prompt with two image tokens for each image, as vLLM expands one."""
    expanded = []
    for token in token_ids:
        expanded += [token, token] if token == IMAGE else [token]
    return expanded


def vllm_rollout(index: int, parameters: SamplingParams, reason: str) -> SimpleNamespace:
    """Return a rollout as vLLM does, all of whose tokens are the seed plus its index.

    The log-probability of each token is -2. Beside each stands the likelier token 3.

    Args:
        index: the number of the rollout in its request.
        parameters: the request's.
        reason: why the rollout ends.
    """
    assert parameters.seed is not None
    assert parameters.max_tokens is not None
    token = parameters.seed + index
    logps_of_position = {3: SimpleNamespace(logprob=-0.1), token: SimpleNamespace(logprob=-2.0)}
    return SimpleNamespace(
        index=index,
        token_ids=[token] * parameters.max_tokens,
        finish_reason=reason,
        logprobs=[logps_of_position] * parameters.max_tokens,
    )


def engine_with_fake_vllm(
    monkeypatch: Any, received_requests: list[Any], reasons: list[str], **overrides: Any
) -> Any:
    """Return a colocated engine, for which `LLM.generate` of vLLM is replaced.

    The rollouts of a request come in reversed order, since vLLM promises none. The tokens of each
    are described at `vllm_rollout`.

    Args:
        monkeypatch: replaces `LLM.generate`.
        received_requests: gets the prompt and the sampling parameters of each request.
        reasons: why the rollouts end, in the order in which they are requested.
        overrides: attributes of the engine that differ.
    """

    def generate(self: Any, prompts: Any, sampling_params: Any, **_: Any) -> list[Any]:
        received_requests.extend(zip(prompts, sampling_params, strict=True))
        remaining_reasons = iter(reasons)
        outputs = []
        for prompt, parameters in zip(prompts, sampling_params, strict=True):
            rollouts = [
                vllm_rollout(index, parameters, reason=next(remaining_reasons))
                for index in range(parameters.n)
            ]
            prompt_ids = expand_images(prompt["prompt_token_ids"])
            outputs.append(SimpleNamespace(prompt_token_ids=prompt_ids, outputs=rollouts[::-1]))
        return outputs

    monkeypatch.setattr(LLM, "generate", generate)
    engine = object.__new__(AdoraVLLMGeneration)
    llm = object.__new__(PolicyLLM)
    llm.model_config = SimpleNamespace(max_model_len=20)
    engine.__dict__.update(
        NEUTRAL,
        mode="colocate",
        enable_sleep_mode=False,
        image_token_id=IMAGE,
        tensor_parallel_size=1,
        logprobs=0,
        generation_kwargs={"stop_token_ids": [7]},
        structured_outputs_regex=None,
        max_completion_length=99,
        llm=llm,
        accelerator=SimpleNamespace(process_index=0),
        model=nn.Linear(1, 1),
    )
    engine.__dict__.update(overrides)
    return engine


def test_a_group_is_one_request_with_seeds_that_count_up(monkeypatch):
    """Rows of one group with the same prompt and images are merged into one request.

    Merged or single, each answer has the seed of its own row.
    """
    first_image = Image.new("RGB", (8, 6))
    second_image = Image.new("RGB", (8, 6))
    # Two objects with the same pixels, as an image has that comes from two processes.
    kept_image = as_image_with_digest(Image.new("RGB", (8, 6), (9, 9, 9)))
    its_copy = as_image_with_digest(Image.new("RGB", (8, 6), (9, 9, 9)))
    images_of_rows = [
        *[[first_image]] * 4,
        [second_image],
        [kept_image],
        [its_copy],
    ]
    prompts = [[START, IMAGE, IMAGE, END]] * 7
    # The rows are numbers 2 to 8, so groups of four begin at the third row and at the seventh.
    numbers: dict[str, Any] = {"first": 2, "generations": 4, "limit": 2}
    requests = sampling_requests(prompts, images_of_rows, **numbers)

    assert [len(request) for request in merge_requests(requests)] == [2, 2, 1, 1, 1]
    requests_of_one_group = [replace(request, merge_key=0) for request in requests]
    assert [len(request) for request in merge_requests(requests_of_one_group)] == [4, 1, 2], (
        "an image and its copy are the same"
    )
    single_requests = sampling_requests(prompts, images_of_rows, grouped=False, **numbers)
    expected_results = [
        SamplingResult(
            tokens=[request.seed] * 2,
            logps=[-2.0] * 2,
            finish_reason=FinishReason.STOP,
            prompt_ids_read=request.prompt_ids,
        )
        for request in requests
    ]
    for same_requests in (requests, single_requests):
        engine = engine_with_fake_vllm(monkeypatch, [], ["stop"] * 7)
        assert engine.sample(same_requests) == expected_results


def test_rollouts_go_on_from_what_they_have_up_to_their_limits(monkeypatch):
    """Each rollout goes on from its tokens, up to its own limit or the engine's context.

    The second one ends by itself. The third has 5 + 12 tokens in a context of 20, so 3 more are all
    ("room"). The last two are new rollouts of one group, and become one request of vLLM.
    """
    received_requests: list[Any] = []
    engine = engine_with_fake_vllm(
        monkeypatch, received_requests, ["length", "stop", "length", "length", "length"]
    )
    prompt = [START, IMAGE, IMAGE, END, 1]
    # (tokens so far, group, seed, the most tokens to sample)
    rollouts: list[tuple[list[int], int, int, int]] = [
        ([5], 10, 21, 3),
        ([5, 6], 11, 22, 3),
        ([5] * 12, 12, 23, 3),
        ([], 1, 31, 4),
        ([], 1, 32, 4),
    ]
    requests = [
        SamplingRequest(
            prompt_ids=[*prompt, *tokens], images=[], merge_key=group, seed=seed, max_tokens=limit
        )
        for tokens, group, seed, limit in rollouts
    ]
    answers = engine.sample(requests, {**engine.sampling_settings, "temperature": 0.5})

    # vLLM expands the image token itself.
    assert [vllm_prompt["prompt_token_ids"] for vllm_prompt, _ in received_requests] == [
        [START, IMAGE, END, 1, *tokens] for tokens, *_ in rollouts[:4]
    ]
    all_parameters = [parameters for _, parameters in received_requests]
    assert [
        (parameters.n, parameters.max_tokens, parameters.seed) for parameters in all_parameters
    ] == [
        (1, 3, 21),
        (1, 3, 22),
        (1, 3, 23),
        (2, 4, 31),
    ]
    assert {parameters.temperature for parameters in all_parameters} == {0.5}, "of this call"
    assert all(parameters.stop_token_ids == [7] for parameters in all_parameters), "of the run"
    assert [answer.finish_reason for answer in answers] == [
        "length",
        "stop",
        "room",
        "length",
        "length",
    ]


def test_a_request_for_few_tokens_asks_for_no_longer_answer():
    """vLLM refuses `min_tokens` above the tokens that one request may sample.

    The answers by which engine and policy are compared are shorter than those of the run.
    """
    settings = {"min_tokens": 10, "max_tokens": 16}
    short = SamplingRequest(prompt_ids=[1], images=[], merge_key=0, max_tokens=8)
    unlimited = SamplingRequest(prompt_ids=[1], images=[], merge_key=0)
    assert short.sampling_parameters(settings) == {"min_tokens": 8, "max_tokens": 8}
    assert unlimited.sampling_parameters(settings) == settings


def test_the_ranks_of_a_divided_engine_ask_for_the_same_and_each_gets_its_own(monkeypatch):
    """Ranks that divide an engine send it the requests of all, and keep their own results.

    One of the two ranks here asks for four rollouts, and the other for three.
    """
    requests_by_rank = [
        sampling_requests([[5]] * 4, generations=4, limit=1),
        sampling_requests([[6]] * 3, first=4, generations=4, limit=1),
    ]

    def gather_from_both(gathered: list[Any], on_this_rank: object, group: object) -> None:
        """Stand in for torch's collective call, which fills the list that it gets."""
        gathered[:] = requests_by_rank

    monkeypatch.setattr(distributed, "all_gather_object", gather_from_both)
    for rank, requests_of_rank in enumerate(requests_by_rank):
        received_requests: list[Any] = []
        monkeypatch.setattr(distributed, "get_rank", lambda group, rank=rank: rank)
        engine = engine_with_fake_vllm(
            monkeypatch, received_requests, ["stop"] * 7, tensor_parallel_size=2, tp_group=None
        )
        answers = engine.sample(requests_of_rank)
        assert [parameters.n for _, parameters in received_requests] == [4, 3]
        assert [answer.tokens for answer in answers] == [
            [request.seed] for request in requests_of_rank
        ]


def test_vllm_takes_an_image_with_a_digest_without_copying_or_hashing_it(monkeypatch):
    """An image that has its digest is read by vLLM without a copy, and cached by the digest.

    Otherwise vLLM would cache it by a hash of its pixels.
    """

    def parse_like_vllm(prompt: dict[str, Any]) -> tuple[Any, dict[str, list[str]]]:
        """Return the first image as vLLM reads it, and the hashes by which it caches them all."""
        items = MultiModalDataParser().parse_mm_data(prompt["multi_modal_data"])
        uuids = parse_mm_uuids(prompt.get("multi_modal_uuids"))
        hashes = ProcessorInputs([1], items, uuids).get_mm_hashes("model", "blake3")
        return items["image"].get(0), hashes

    image = as_image_with_digest(Image.new("RGB", (8, 6), (1, 2, 3)))
    prompt = {"prompt_token_ids": [1], "multi_modal_data": {"image": image}}
    copied_image, _ = parse_like_vllm(prompt)
    assert copied_image is not image, (
        "if vLLM did not copy any more, there would be nothing to save"
    )
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", None)  # hashing fails from here on
    vllm_image, hashes = parse_like_vllm(with_image_digests(prompt))
    assert vllm_image is image
    assert hashes == {"image": [image.digest]}
    two_images = {"prompt_token_ids": [1], "multi_modal_data": {"image": [image, image]}}
    _, hashes = parse_like_vllm(with_image_digests(two_images))
    assert hashes == {"image": [image.digest] * 2}


def test_images_that_may_be_drawn_on_go_to_vllm_as_they_are():
    """A row with an image that may still be changed goes to vLLM without digests.

    vLLM would cache the image by its digest, which may be wrong by the time vLLM reads it. Only an
    image that nobody can change any more has one.
    """
    changeable_image = Image.new("RGB", (8, 6))
    rows: list[dict[str, Any]] = [
        {"prompt_token_ids": [1]},
        {"prompt_token_ids": [1], "multi_modal_data": {"image": changeable_image}},
    ]
    rows.append(
        {
            "prompt_token_ids": [1],
            "multi_modal_data": {
                "image": [as_image_with_digest(Image.new("RGB", (8, 6))), changeable_image]
            },
        }
    )
    assert [with_image_digests(row) for row in rows] == rows


def test_other_pixels_another_mode_or_another_size_is_another_image():
    """Each of four images has a digest of its own, and equal images have the same."""
    images = [
        Image.new("RGB", (8, 6)),
        Image.new("RGB", (6, 8)),
        Image.new("L", (8, 18)),
        Image.new("RGB", (8, 6), 1),
    ]
    assert len({as_image_with_digest(image).digest for image in images}) == 4
    assert (
        as_image_with_digest(Image.new("RGB", (8, 6))).digest
        == as_image_with_digest(Image.new("RGB", (8, 6))).digest
    )


def test_each_run_of_image_tokens_becomes_one(subtests):
    """vLLM expands an image token itself, so it gets a prompt with one token for each image."""
    cases: list[tuple[list[int], list[int]]] = [
        ([1, START, IMAGE, IMAGE, IMAGE, END, 2], [1, START, IMAGE, END, 2]),
        (
            [START, IMAGE, IMAGE, END, START, IMAGE, END],
            [START, IMAGE, END, START, IMAGE, END],
        ),  # two images
        ([1, 1, 2, 2], [1, 1, 2, 2]),  # no image: other repetitions stay
        ([IMAGE, IMAGE], [IMAGE]),
        ([], []),
    ]
    for ids, collapsed in cases:
        with subtests.test(f"{ids}"):
            assert prompt_tokens.collapse_image_runs(ids, IMAGE) == collapsed


def test_the_first_row_that_differs_is_named_with_the_token_counts_or_the_tokenizer():
    """The prompts of trainer and engine are compared token by token, row by row.

    If their image tokens differ, the error names the limits of pixels, and otherwise the tokenizer.
    """
    prompt_tokens.check_prompts([[1, 2], [3]], [(1, 2), (3,)], IMAGE)
    with pytest.raises(
        prompt_tokens.PromptMismatchError, match="trainer 1, engine 2.*min_pixels"
    ) as caught:
        prompt_tokens.check_prompts(
            [[1], [1, IMAGE], [IMAGE]], [[1], [1, IMAGE, IMAGE], [2]], IMAGE
        )
    assert caught.value.row == 1
    with pytest.raises(
        prompt_tokens.PromptMismatchError, match="the text differs.*tokenizer"
    ) as caught:
        prompt_tokens.check_prompts([[1, IMAGE, 2]], [[1, IMAGE, 3]], IMAGE)
    assert caught.value.row == 0
    with pytest.raises(ValueError, match="shorter"):  # a missing row is not passed over
        prompt_tokens.check_prompts([[1], [2]], [[1]], IMAGE)


def test_a_mismatch_names_the_row_by_its_id_or_its_number():
    """The error of a mismatch names the row's id, or its number; other errors stay as they are."""
    # Row 1 differs.
    for rows, name in (
        ([{}, {"id": "train/7"}], "row train/7:"),
        ([{}, {}], "row #1 of this rank's batch:"),
    ):
        with (
            pytest.raises(RolloutError, match=f"^{name} .*tokenizer"),
            prompt_tokens.naming_mismatched_row(rows),
        ):
            prompt_tokens.check_prompts([[1], [2]], [[1], [3]], IMAGE)
    with (
        pytest.raises(RolloutError, match="^the engine stopped$"),
        prompt_tokens.naming_mismatched_row([{"id": "train/7"}]),
    ):
        raise RolloutError("the engine stopped")


def test_vision_tokens_are_never_sampled_and_the_users_bans_stay():
    """The tokens around and in images are banned in addition to those that the user bans.

    A sampled image token would break the trainer's forward pass, for which there is no image.
    """
    # A vocabulary with vision tokens, then one without.
    names = ["a", "<|image_pad|>", "<|vision_start|>", "b", "<|video_pad|>", "<|vision_end|>"]
    for vocabulary, banned in ((names, [1, 2, 4, 5]), (["a", "b"], [])):
        id_by_name = {name: token_id for token_id, name in enumerate(vocabulary)}
        tokenizer: Any = SimpleNamespace(get_vocab=lambda id_by_name=id_by_name: id_by_name)
        assert sorted(prompt_tokens.never_sampled_ids(tokenizer)) == banned
    settings: dict[str, Any] = {"suppress_tokens": [7, 3]}
    config = GenerationConfig()
    prompt_tokens.ban_tokens([3, 1], settings, config)

    assert settings["suppress_tokens"] == config.suppress_tokens == [1, 3, 7]
    settings = {}
    config = GenerationConfig()
    prompt_tokens.ban_tokens([], settings, config)
    assert settings == {}
    assert config.suppress_tokens is None


def test_a_prompt_that_begins_the_answer_is_refused_before_any_step():
    """A prompt may not end with a turn of the assistant; one in the middle is fine.

    TRL would close that turn and open a new one, so the answer would not go on from it.
    """
    question = [{"role": "user", "content": "How long?"}]
    question_and_begun_answer = [*question, {"role": "assistant", "content": "<think>"}]
    prompt_tokens.refuse_prefill(
        Dataset.from_dict({"prompt": [question, [*question_and_begun_answer, *question]]})
    )
    with pytest.raises(UserError, match="^prompt: row 1 ends with a turn of the assistant"):
        prompt_tokens.refuse_prefill(
            Dataset.from_dict({"prompt": [question, question_and_begun_answer]})
        )
