"""Whether engine and trainer agree: `SelfCheck`, which may refuse a run before its first step.

The tests cover how far log-probabilities may be apart, and how prompts are lengthened to compare
tokens at late positions of the context.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.rollout import agreement
from adora_vl.rollout.engine_and_policy import NamedPrompts
from adora_vl.utils.checks import Check, failed, passed
from adora_vl.utils.errors import RolloutError

TOKENIZER = load_processor(str(PRETRAINED_FOLDER)).tokenizer


IMAGE = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
WORDS = [token for token in range(len(TOKENIZER)) if token not in TOKENIZER.all_special_ids]


def pair_with_positions(model: int = 10**6, engine: int = 10**6) -> Any:
    """Return a fake pair of policy and engine.

    `model` and `engine`: how many positions each takes, by default practically any number.
    """
    config = SimpleNamespace(max_position_embeddings=model)
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=engine))
    )
    policy = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    return SimpleNamespace(
        tokenizer=TOKENIZER,
        config=SimpleNamespace(seed=0, vllm_mode="colocate"),
        engine=SimpleNamespace(llm=llm),
        policy=policy,
    )


def prompts_with_images(shapes: list[tuple[list[int], list[int]]]) -> NamedPrompts:
    """Return prompts that have images and then a text.

    `shapes`: for each row the token ids of its text, and the sizes of its images in image tokens.
    An image token has four patches. For example, ([5, 6], [2]) gives the prompt [IMAGE, IMAGE, 5,
    6] with eight patches.
    """
    ids = [
        [token for size in sizes for token in [IMAGE] * size] + text_ids
        for text_ids, sizes in shapes
    ]
    grids = [[1, 2, 2 * size] for _, sizes in shapes for size in sizes]
    token_types = [[int(token == IMAGE) for token in row] for row in ids]
    patches = sum(2 * 2 * size for _, sizes in shapes for size in sizes)
    fields: dict[str, Any] = {
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": token_types,
    }
    fields["pixel_values"] = torch.arange(patches)[:, None].float()
    names = [str(number) for number in range(len(ids))]
    return NamedPrompts([], ids, [[None] * len(sizes) for _, sizes in shapes], fields, names)


PROMPT_SHAPES = st.tuples(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=30),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
)


@settings(max_examples=25)
@given(
    shapes=st.lists(PROMPT_SHAPES, min_size=1, max_size=5),
    tokens=st.integers(1, 40),
    longest=st.integers(130, 4000),
)
def test_lengthened_prompts_are_the_same_prompts_behind_tokens_of_their_own_text(
    shapes, tokens, longest
):
    """A prompt is moved to late positions by words of its own text, which are put before it.

    The longest one then ends as late as the engine's context and the tokens of the answer allow.
    Images stay the same.
    """
    near = prompts_with_images(shapes)
    far = agreement.lengthened_prompts(pair_with_positions(engine=longest), near, tokens)
    assert far is not None
    assert far.images is not None
    rows = len(shapes[: agreement.FAR_ROWS])  # only the first rows are moved
    # The longest prompt leaves room for the answer, and all are longer by the same number.
    assert max(map(len, far.ids)) == min(agreement.FAR_POSITION, longest - tokens)
    added_lengths = {
        len(far_ids) - len(near_ids) for far_ids, near_ids in zip(far.ids, near.ids, strict=False)
    }
    assert len(added_lengths) == 1
    for (text_ids, _), far_ids, near_ids in zip(shapes, far.ids, near.ids, strict=False):
        assert far_ids[-len(near_ids) :] == near_ids
        assert set(far_ids[: -len(near_ids)]) <= set(text_ids)
    for ids, token_types in zip(far.ids, far.fields["mm_token_type_ids"], strict=True):
        assert token_types == [int(token == IMAGE) for token in ids]
    sizes = [size for _, row in shapes[:rows] for size in row]
    assert far.fields["image_grid_thw"].prod(dim=-1).tolist() == [4 * size for size in sizes]
    assert torch.equal(far.fields["pixel_values"], near.fields["pixel_values"][: 4 * sum(sizes)])
    assert far.num_images == near.num_images[:rows]
    assert len(far.row_names) == rows


def test_where_model_or_engine_have_no_room_no_prompt_is_lengthened():
    """There are no lengthened prompts (None) if prompt and answer leave no position free.

    An answer takes 8 of 40 positions: a prompt of 34 tokens has no room, and one of 24 has.
    """
    long_prompt = prompts_with_images([(WORDS[:30], [4])])
    short_prompt = prompts_with_images([(WORDS[:20], [4])])
    for limits in ({"model": 40}, {"engine": 40}):
        pair = pair_with_positions(**limits)
        assert agreement.lengthened_prompts(pair, long_prompt, 8) is None
        assert agreement.lengthened_prompts(pair, short_prompt, 8) is not None


def test_prompts_without_images_keep_none():
    """The first two of three prompts of text are lengthened, up to the engine's context."""
    text_prompts = NamedPrompts([], [[20, 21], [22], [23]], None, {}, ["a", "b", "c"])
    far = agreement.lengthened_prompts(pair_with_positions(engine=100), text_prompts, 10)
    assert far is not None
    assert far.images is None
    assert far.fields == {}
    # The context of 100 less an answer of 10. Of three prompts the first two are moved.
    assert [len(row) for row in far.ids] == [90, 89]
    assert agreement.first_prompts(text_prompts, 1).ids == [[20, 21]]


def test_the_bound_follows_the_coarser_dtype(subtests):
    """Engine and trainer may differ by more where one of them rounds to bfloat16.

    They may also differ by more where a filter such as `top_p` changes the engine's numbers, and
    not the trainer's. The bound is never above `adora_max_drift`, with which a run would stop.
    """
    # (the engine's dtype, changed keys of the config, the bound in nats)
    cases: list[Any] = [
        ("float32", {}, 0.01),
        ("bfloat16", {}, 0.3),
        ("float32", {"bf16": True}, 0.3),
        ("bfloat16", {"adora_max_drift": 0.1}, 0.1),
        ("float32", {"adora_max_drift": None}, 0.01),
        ("float32", {"top_k": -1}, 0.01),  # vLLM's word for no filter
        ("float32", {"top_p": 0.9}, 0.3),
    ]
    for engine, keys, bound in cases:
        with subtests.test(f"{engine} {keys!r:.80} {bound}"):
            precision = {"bf16": False, "fp16": False, "adora_max_drift": 0.3}
            sampling = {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": None,
                "repetition_penalty": 1.0,
            }
            args = SimpleNamespace(**{**precision, **sampling, **keys})
            model = SimpleNamespace(dtype=torch.float32)
            settings = SimpleNamespace(dtype=engine)
            pair: Any = SimpleNamespace(
                config=args,
                policy=model,
                engine=SimpleNamespace(settings=settings),
            )
            assert agreement.agreement_bound(pair) == bound
            # Late positions have a stricter bound where both compute in float32.
            distant_bound = 0.001 if bound == 0.01 else bound
            assert agreement.distant_bound(pair) == distant_bound


@pytest.fixture
def run_self_check(monkeypatch):
    """Return a function that runs `SelfCheck` as at the start of a training.

    It takes the results of the checks, in place of a real comparison, and the engine.
    """

    def start(checks: list[Check], engine: object = "an engine") -> None:
        monkeypatch.setattr(agreement.EngineProbe, "check_all", lambda self: checks)
        accelerator = SimpleNamespace(process_index=0, is_main_process=True)
        pair: Any = SimpleNamespace(
            engine=engine,
            accelerator=accelerator,
            first_rows=lambda count: [{}] * count,
            read_prompts=lambda rows: prompts_with_images([([20], [1])]),
        )
        agreement.SelfCheck(pair).on_train_begin(None, None, None)

    return start


def test_training_starts_where_engine_and_trainer_agree(run_self_check, capsys):
    """If all checks have passed, the training starts and the measured difference is printed."""
    run_self_check(
        [
            passed(agreement.PROMPTS_CHECK, "2 prompts"),
            passed(agreement.AGREEMENT_CHECK, "1e-06 nats per token"),
        ]
    )
    assert (
        capsys.readouterr().out == "Self-check: engine and trainer differ by 1e-06 nats per token\n"
    )


def test_training_is_refused_where_engine_and_trainer_do_not_agree(run_self_check):
    """If a check has failed, the error says what to do, and which key leaves the check out."""
    with pytest.raises(
        RolloutError,
        match=r"agreement, cold: 3 nats per token\. Mend it\..*--adora_self_check false",
    ):
        run_self_check(
            [
                passed(agreement.PROMPTS_CHECK, "2 prompts"),
                failed(agreement.AGREEMENT_CHECK, "3 nats per token", "mend it"),
            ]
        )


def test_without_an_engine_there_is_nothing_to_check(run_self_check, capsys):
    """A run without an engine makes no check: one that would fail is not looked at."""
    run_self_check([failed(agreement.AGREEMENT_CHECK, "not looked at", "x")], engine=None)
    assert capsys.readouterr().out == ""
