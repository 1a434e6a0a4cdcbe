"""Rollouts that share their prompt in a packed pass give what padded rows give.

A packed pass joins the prompt of a group and its rollouts in one sequence, and computes the prompt
once. Attention is split, so that each rollout sees the prompt and itself. Log-probabilities and
gradients are compared in float64.
"""

import warnings
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention import varlen as torch_varlen
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations import flash_attention
from trl.trainer.utils import add_fused_lm_head

from adora_vl.packing import packed_forward as packed_module
from adora_vl.packing import span_attention, split_attention
from adora_vl.packing.packed_forward import PackedForward, PassInputs
from adora_vl.packing.pass_differences import has_dropout
from adora_vl.packing.policy_pass import PolicyPass
from adora_vl.packing.row_positions import prompt_position_ids
from adora_vl.packing.shared_prompt import (
    GroupLayout,
    PackedLayout,
    PackedSequence,
    group_rows_by_prompt,
    pack_rows,
    packing_pays,
)
from adora_vl.packing.split_attention import (
    LAYOUT_ARGUMENT,
    configured_attention,
    empty_mask,
    install_packed_attention,
)
from adora_vl.types import RowsOnCpu
from tests.support.small_models import (
    FLOAT64_BOUND,
    IMAGE_TOKEN,
    SMALL_VOCABULARY,
    TEXT_CONFIG,
    VISION_BOUND,
    small_model,
)
from tests.support.varlen import varlen_attn


@pytest.fixture(autouse=True)
def softmax_keeps_its_dtype(monkeypatch):
    """Patch softmax to ignore its dtype, since eager attention asks for float32."""
    softmax = torch.nn.functional.softmax

    def softmax_in_dtype_of_scores(
        scores: Tensor, dim: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        return softmax(scores, dim=dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax_in_dtype_of_scores)


Batch = dict[str, Any]


# One image of 2 x 3 tokens, each of 2 x 2 patches; its tokens are between a start and an end token.
IMAGE_GRID = torch.tensor([[1, 4, 6]])
IMAGE_IDS = torch.tensor([8, *[IMAGE_TOKEN] * 6, 9])


def random_rows(lengths: list[tuple[int, list[int]]], images: bool) -> Batch:
    """Draw rows as TRL pads them: prompts on the left, completions on the right.

    For example, [(2, [3, 1])] gives two rows with the same prompt of two tokens, and completions of
    three tokens and of one token with two of padding.

    Args:
        lengths: for each group the length of its prompt and those of its rollouts.
        images: whether each prompt begins with an image.

    Returns:
        `ids` and `mask`, (B, P + C); `completion`, the width C; `groups`, the row numbers of each
        group. With images also the `patches` of each group's image, the `grid` of each image, and
        the `types` of tokens, 1 for image tokens.
    """
    generator = torch.Generator().manual_seed(1)
    image_length = len(IMAGE_IDS) if images else 0
    longest_prompt = max(prompt_length for prompt_length, _ in lengths) + image_length
    all_rollout_lengths = [length for _, rollout_lengths in lengths for length in rollout_lengths]
    completion = max([1, *all_rollout_lengths])
    ids: list[Tensor] = []
    masks: list[Tensor] = []
    groups: list[list[int]] = []
    patches: list[Tensor] = []
    for prompt_length, rollout_lengths in lengths:
        prompt_ids = torch.randint(10, SMALL_VOCABULARY, (prompt_length,), generator=generator)
        if images:
            prompt_ids = torch.cat([IMAGE_IDS, prompt_ids])
            patches.append(torch.randn(24, 16, dtype=torch.float64, generator=generator))
        padding = longest_prompt - len(prompt_ids)
        first_row = len(ids)
        groups.append(list(range(first_row, first_row + len(rollout_lengths))))
        for length in rollout_lengths:
            completion_ids = torch.randint(10, SMALL_VOCABULARY, (completion,), generator=generator)
            completion_ids[length:] = 0
            ids.append(torch.cat([prompt_ids.new_zeros(padding), prompt_ids, completion_ids]))
            mask = torch.zeros(longest_prompt + completion, dtype=torch.long)
            mask[padding : longest_prompt + length] = 1
            masks.append(mask)
    rows: Batch = {
        "ids": torch.stack(ids),
        "mask": torch.stack(masks),
        "completion": completion,
        "groups": groups,
    }
    if images:
        rows["patches"] = patches
        rows["grid"] = IMAGE_GRID
        rows["types"] = (rows["ids"] == IMAGE_TOKEN).long()
    return rows


def group_of_each_row(rows: Batch) -> list[int]:
    """Return the number of its group for each row."""
    numbers = []
    for number, group_rows in enumerate(rows["groups"]):
        numbers += [number] * len(group_rows)
    return numbers


def prompt_positions_and_images(model: Any, rows: Batch) -> tuple[Tensor, dict[str, Any]]:
    """Return the position ids of the groups' prompts, and the model's image arguments."""
    first_rows = [group_rows[0] for group_rows in rows["groups"]]
    prompt_width = rows["ids"].size(1) - rows["completion"]
    grids = None
    types = None
    images: dict[str, Any] = {}
    if "grid" in rows:
        grids = rows["grid"].repeat(len(first_rows), 1)
        types = rows["types"][first_rows, :prompt_width]
        images = {"pixel_values": torch.cat(rows["patches"]), "image_grid_thw": grids}
    positions = prompt_position_ids(
        model,
        prompt_ids=rows["ids"][first_rows, :prompt_width],
        prompt_mask=rows["mask"][first_rows, :prompt_width],
        token_types=types,
        grids=grids,
    )
    return positions, images


def pack_padded_rows(
    ids_BS: Tensor,
    attention_mask: Tensor,
    completion_width: int,
    groups: list[list[int]],
    prompt_position_ids: Tensor,
) -> PackedSequence:
    """Return padded rows without images as one packed sequence."""
    prompt_width = ids_BS.size(1) - completion_width
    rows_on_cpu = RowsOnCpu.of(
        prompt_ids=ids_BS[:, :prompt_width],
        prompt_mask=attention_mask[:, :prompt_width],
        completion_mask=attention_mask[:, prompt_width:],
        columns={},
    )
    return pack_rows(
        ids_BS,
        attention_mask=attention_mask,
        completion_width=completion_width,
        groups=groups,
        prompt_position_ids=prompt_position_ids,
        rows_on_cpu=rows_on_cpu,
    )


def packed_logps(model: Any, rows: Batch) -> Tensor:
    """Return the completions' log-probabilities from one packed sequence, (B, C)."""
    install_packed_attention(model)
    positions, images = prompt_positions_and_images(model, rows)
    packed = pack_padded_rows(
        rows["ids"],
        attention_mask=rows["mask"],
        completion_width=rows["completion"],
        groups=rows["groups"],
        prompt_position_ids=positions,
    )
    layout = {LAYOUT_ARGUMENT: packed.layout}
    output = model(
        input_ids=packed.ids_NS,
        position_ids=packed.position_ids,
        attention_mask=empty_mask(packed.ids_NS.device),
        **layout,
        **images,
    )
    logits = output.logits
    assert logits.shape[:2] == packed.labels.shape, "the head computes scored positions alone"
    labels = packed.labels.clamp(min=0)
    label_logps = logits.log_softmax(-1).gather(-1, labels[..., None])
    return packed.spread_over_rows(label_logps)


def padded_logps(model: Any, rows: Batch) -> Tensor:
    """Return the completions' log-probabilities from padded rows, (B, C)."""
    model_inputs: dict[str, Any] = {}
    if "grid" in rows:
        copies = [rows["patches"][number] for number in group_of_each_row(rows)]
        model_inputs = {
            "pixel_values": torch.cat(copies),
            "image_grid_thw": rows["grid"].repeat(len(copies), 1),
            "mm_token_type_ids": rows["types"],
        }
    elif model.config.model_type == "qwen2":
        model_inputs = {"position_ids": (rows["mask"].cumsum(-1) - 1).clamp(min=0)}
    output = model(
        input_ids=rows["ids"], attention_mask=rows["mask"], use_cache=False, **model_inputs
    )
    next_tokens = rows["ids"][:, 1:, None]
    logps = output.logits[:, :-1].log_softmax(-1).gather(-1, next_tokens)[..., 0]
    completion = rows["completion"]
    return logps[:, -completion:] * rows["mask"][:, -completion:]


def gradients(model: Any, logps: Tensor) -> dict[str, Tensor]:
    """Return the gradients, by parameter, of a loss in which every token has its own weight."""
    weights = torch.linspace(-1, 2, logps.numel(), dtype=torch.float64).view_as(logps)
    model.zero_grad()
    (logps.exp() * weights).sum().backward()
    gradient_by_name = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient_by_name[name] = parameter.grad.clone()
    return gradient_by_name


def assert_packed_is_as_padded(model: Any, rows: Batch) -> None:
    """Assert that shared prompts give the log-probabilities and gradients of padded rows."""
    expected_logps = padded_logps(model, rows)
    expected_gradients = gradients(model, expected_logps)
    logps = packed_logps(model, rows)
    logps_scale = max(float(expected_logps.abs().max()), 1.0)
    assert (logps - expected_logps).abs().max() <= FLOAT64_BOUND * logps_scale
    gradient_scale = max(gradient.norm() for gradient in expected_gradients.values())
    shared_gradients = gradients(model, logps)
    for name, expected in expected_gradients.items():
        bound = VISION_BOUND if "visual" in name else FLOAT64_BOUND
        # A gradient that is next to nothing is compared with a thousandth of the largest.
        scale = max(expected.norm(), 1e-3 * gradient_scale)
        assert (shared_gradients[name] - expected).norm() <= bound * scale, name


# Length of the prompt and lengths of the rollouts; some rollouts share an attention call.
TWO_GROUPS = [
    (5, [4, 1, 9, 4, 2]),
    (11, [3, 3, 3]),
]
FAMILIES = ("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def test_two_groups_are_as_separate_rows(subtests):
    """Every family of models, with sdpa and with eager attention, gives what padded rows give."""
    for model_type, attention in product(FAMILIES, ("sdpa", "eager")):
        with subtests.test(f"{model_type} {attention}"):
            assert_packed_is_as_padded(
                small_model(model_type, attention),
                random_rows(TWO_GROUPS, images=model_type != "qwen2"),
            )


def test_gradient_checkpointing_computes_the_same_attention_again(subtests):
    """With gradient checkpointing a packed pass still equals padded rows.

    A layer that is recomputed in the backward pass needs the layout of the packed sequence again.
    """
    for model_type in FAMILIES:
        with subtests.test(model_type):
            model = small_model(model_type)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert_packed_is_as_padded(model, random_rows(TWO_GROUPS, images=model_type != "qwen2"))


def test_float32_weights_under_autocast_get_the_kernel_for_bfloat16(monkeypatch):
    """Under bfloat16 autocast the attention of float32 weights gets queries in bfloat16.

    A GPU has flash attention for these, which needs neither masks nor copies of keys.
    """
    sdpa = Mock(side_effect=nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(span_attention, "scaled_dot_product_attention", sdpa)
    model = Qwen2ForCausalLM(Qwen2Config(**TEXT_CONFIG, use_cache=False))
    rows = random_rows(TWO_GROUPS, images=False)
    with torch.autocast("cpu", torch.bfloat16):
        packed_logps(model, rows)
    queries = [call.args[0] for call in sdpa.call_args_list]
    assert {query.dtype for query in queries} == {torch.bfloat16}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_s_pass_with_one_call_is_as_separate_rows(monkeypatch, checkpointing):
    """With a kernel for spans of different lengths, a packed pass still equals padded rows.

    A span is what attends together: a prompt with its longest rollout, or another rollout with the
    prompt's keys. A GPU's kernel takes all of them in one call; here a function stands in for it.
    """
    kernel = Mock(side_effect=varlen_attn)
    monkeypatch.setattr(torch_varlen, "varlen_attn", kernel)
    monkeypatch.setattr(split_attention.VARLEN_ATTENTION, "supports", lambda *_: True)
    model = small_model("qwen2_5_vl")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = random_rows(TWO_GROUPS, images=True)
    packed_logps(model, rows)
    assert kernel.call_count == 2, "a call a layer, whatever the number of rollouts"
    assert_packed_is_as_padded(model, rows)


def test_eager_attention_and_a_cpu_s_are_computed_span_by_span(monkeypatch):
    """On a CPU, and with eager attention, no pass makes one call for all spans (`attend_spans`).

    A pass that does would fail here. Eager attention is also tried as on a GPU with that kernel.
    """
    monkeypatch.setattr(split_attention, "attend_spans", None)
    rows = random_rows(TWO_GROUPS, images=False)
    packed_logps(small_model("qwen2"), rows)
    monkeypatch.setattr(split_attention.VARLEN_ATTENTION, "supports", lambda *_: True)
    packed_logps(small_model("qwen2", "eager"), rows)


MODELS = {attention: small_model("qwen2", attention) for attention in ("sdpa", "eager")}
GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 12), min_size=1, max_size=5)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=25)
@given(GROUPS, st.sampled_from(sorted(MODELS)))
def test_any_lengths_are_as_separate_rows(lengths, attention):
    """Packed rows of any lengths equal padded ones, also rollouts of no tokens.

    A rollout has none where it was cut off and is masked out. Where no rollout has any, there is
    nothing to compare.
    """
    has_a_token = any(length for _, rollout_lengths in lengths for length in rollout_lengths)
    if has_a_token:
        assert_packed_is_as_padded(MODELS[attention], random_rows(lengths, images=False))


def test_nothing_that_is_kept_for_the_backward_pass_grows_with_the_square_of_a_group():
    """The largest saved tensor of a packed pass is far smaller than the sequence's length squared.

    A mask of the whole packed sequence would have so many entries. Here a prompt of 6 tokens has 16
    rollouts of 40.
    """
    rows = random_rows([(6, [40] * 16)], images=False)
    saved_sizes: list[int] = []

    def record_size(tensor: Tensor) -> Tensor:
        saved_sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
        packed_logps(MODELS["sdpa"], rows)
    tokens = 6 + 16 * 39  # a rollout's last token predicts nothing, and is left out
    assert max(saved_sizes) < tokens**2 / 4


def test_an_adapter_is_trained_alike():
    """With LoRA the gradients of the adapter's weights are those of padded rows too."""
    model = get_peft_model(
        small_model("qwen2_5_vl"), LoraConfig(target_modules=["q_proj", "v_proj"])
    ).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    assert_packed_is_as_padded(model, random_rows(TWO_GROUPS, images=True))


def test_everything_but_a_shared_prompt_goes_to_the_models_own_attention(tmp_path, subtests):
    """Plain passes, generation and saved files stay what they were, also after a failed pass."""
    for model_type in FAMILIES:
        with subtests.test(model_type):
            model = small_model(model_type).eval()
            rows = random_rows([(5, [4, 2])], images=False)
            logits_before, tokens_before = logits_and_generated_tokens(model, rows)
            install_packed_attention(model)
            install_packed_attention(model)  # a second time, which changes nothing
            layout_of_other_rows = pack_padded_rows(
                rows["ids"],
                attention_mask=rows["mask"],
                completion_width=4,
                groups=rows["groups"],
                prompt_position_ids=torch.arange(5)[None],
            ).layout
            with pytest.raises(RuntimeError):  # more positions than there are tokens
                model(
                    rows["ids"][:1, :3],
                    attention_mask=empty_mask(torch.device("cpu")),
                    **{LAYOUT_ARGUMENT: layout_of_other_rows},
                )
            logits_after, tokens_after = logits_and_generated_tokens(model, rows)
            assert torch.equal(logits_after, logits_before)
            assert torch.equal(tokens_after, tokens_before)
            assert configured_attention(model.config) == "sdpa"
            another_model = type(model)(model.config)
            assert configured_attention(another_model.config) == "sdpa"
            model.config.save_pretrained(tmp_path / model_type)
            assert "shared_prompt" not in (tmp_path / model_type / "config.json").read_text()
            vision = getattr(model.config, "vision_config", None)
            assert vision is None or vision._attn_implementation == "sdpa"


def logits_and_generated_tokens(model: Any, rows: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits of a plain pass, and the tokens of greedy generation."""
    with torch.no_grad():
        tokens = model.generate(
            rows["ids"],
            attention_mask=rows["mask"],
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        )
        output = model(rows["ids"], attention_mask=rows["mask"])
    return output.logits, tokens


@pytest.mark.parametrize("has_patch_numbers", [True, False], ids=["patch_numbers", "pixels"])
def test_a_pass_packs_groups_and_rows_whose_images_are_not_known(has_patch_numbers, monkeypatch):
    """Rows of a group share their prompt if patch numbers tell that their images are equal.

    A patch number is the place of a patch in a bank of images. Pixels tell nothing, so with these
    each row keeps its own prompt. There are groups of five and of three rows, and a chunk has
    five rows. The first pass also compares packed with padded rows, in the first chunk alone.
    """
    model = small_model("qwen2_5_vl")
    rows = random_rows(TWO_GROUPS, images=True)
    copies = group_of_each_row(rows)
    expected = padded_logps(model, rows).detach()
    inputs = {
        "image_grid_thw": rows["grid"].repeat(len(copies), 1),
        "num_images": [1] * len(copies),
        "mm_token_type_ids": rows["types"],
        "pixel_values": torch.cat([rows["patches"][number] for number in copies]),
    }
    if has_patch_numbers:
        # An image has 24 patches, so that of group 1 has the numbers 24 to 47 in the bank.
        patch_numbers = [torch.arange(24)[:, None] + 24 * number for number in copies]
        inputs["pixel_values"] = torch.cat(patch_numbers)
        image_features = model.model.get_image_features
        bank = torch.cat(rows["patches"])

        def features_of_patch_numbers(patch_numbers: Tensor, grid: Tensor, **_: object) -> Any:
            return image_features(bank[patch_numbers[:, 0]], grid)

        monkeypatch.setattr(model.model, "get_image_features", features_of_patch_numbers)
    add_fused_lm_head(model)
    groups_by_chunk: list[Any] = []

    def pack_and_record_groups(*arguments: Any, **named: Any) -> Any:
        groups_by_chunk.append(named["groups"])
        return pack_rows(*arguments, **named)

    monkeypatch.setattr(packed_module, "pack_rows", pack_and_record_groups)

    def first_separate_rows(row_count: int, columns: dict[str, Any]) -> Any:
        """Stand in for the padded pass with which packed rows are compared."""
        assert row_count == 5, "the first chunk alone"
        assert len(columns["image_grid_thw"]) == 5
        assert len(columns["num_images"]) == 5
        assert len(columns["mm_token_type_ids"]) == 5
        assert len(columns["pixel_values"]) == 5 * 24
        return expected[:row_count], None, None

    forward = PackedForward(Accelerator(cpu=True), lambda size: nullcontext())
    pass_inputs = PassInputs(
        model,
        input_ids=rows["ids"],
        attention_mask=rows["mask"],
        completion_width=rows["completion"],
        batch_size=5,
        compute_entropy=False,
        batch_columns=inputs,
    )
    result = forward(pass_inputs, first_separate_rows)
    assert result is not None
    assert forward.pass_count == 1
    assert not forward.disabled_reason
    group_sizes = [[len(group_rows) for group_rows in groups] for groups in groups_by_chunk]
    # The check of the first chunk, then both chunks.
    if has_patch_numbers:
        assert group_sizes == [[5], [5], [3]]
    else:
        assert group_sizes == [[1] * 5, [1] * 5, [1] * 3]
    assert (result[0] - expected).abs().max() < 1e-4, "the head computes in float32"


@pytest.mark.parametrize(("gap", "shares"), [(0.0, True), (1.0, False)])
def test_the_check_alone_comes_before_a_generation_is_cut(gap, shares):
    """A check of packed against padded rows decides whether the run shares prompts.

    It is made once, though packing would save nothing here. `gap`: how far padded rows are from
    packed ones. `shares`: whether prompts are shared afterwards.
    """
    model = small_model("qwen2")
    rows = random_rows([(1, [8, 8])], images=False)
    expected = padded_logps(model, rows).detach() + gap
    add_fused_lm_head(model)
    switches: Any = SimpleNamespace(uses=lambda part: part == "share_prompt")
    row_counts: list[int] = []

    def separate_rows(model: Any, ids: Tensor, *_: object, **__: object) -> Any:
        row_counts.append(len(ids))
        return expected[: len(ids)], None, None

    policy = PolicyPass(
        separate_rows,
        Accelerator(cpu=True),
        switches,
        may_have_images=False,
        checkpointing_context=lambda size: nullcontext(),
    )
    prompt_width = rows["ids"].size(1) - rows["completion"]
    columns: Any = {
        "prompt_ids": rows["ids"][:, :prompt_width],
        "prompt_mask": rows["mask"][:, :prompt_width],
        "completion_ids": rows["ids"][:, prompt_width:],
        "completion_mask": rows["mask"][:, prompt_width:],
    }
    assert policy.needs_check
    assert not policy.shares_prompts, "nothing is known yet"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy.check(model, columns)
    assert row_counts == [2]
    assert policy.packed_forward.pass_count == 0
    assert not policy.needs_check
    assert policy.shares_prompts == shares


def fake_flash_attention(
    query, key, value, attention_mask, *, is_causal, softmax_scale, attn_implementation, **kwargs
) -> Tensor:
    """Compute what Transformers' flash attention does, whose kernels need a GPU.

    Sequences are joined end to end. Each is causal, with the mask aligned to the lower right.
    """
    assert is_causal
    assert attention_mask is None
    assert attn_implementation == "flash_attention_2"
    return varlen_attn(
        query[0],
        key[0],
        value[0],
        kwargs["cu_seq_lens_q"],
        kwargs["cu_seq_lens_k"],
        kwargs["max_length_q"],
        kwargs["max_length_k"],
        scale=softmax_scale,
        window_size=(-1, 0),
        enable_gqa=True,
    )[None]


def test_flash_attention_gets_each_span_with_its_prompt(monkeypatch):
    """With flash attention a packed pass gives what padded rows give with sdpa.

    `fake_flash_attention` stands in for the kernels, which need a GPU.
    """
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", fake_flash_attention)
    rows = random_rows(TWO_GROUPS, images=True)
    reference = small_model("qwen2_5_vl")
    model = small_model("qwen2_5_vl")
    model.get_decoder().config._attn_implementation = "flash_attention_2"
    expected_logps = padded_logps(reference, rows)
    logps = packed_logps(model, rows)
    assert (logps - expected_logps).abs().max() <= FLOAT64_BOUND * expected_logps.abs().max()
    expected_gradients = gradients(reference, expected_logps)
    flash_gradients = gradients(model, logps)
    scale = max(gradient.norm() for gradient in expected_gradients.values())
    for name, expected in expected_gradients.items():
        assert (flash_gradients[name] - expected).norm() <= VISION_BOUND * scale, name


def test_flash_attention_finds_its_own_name_where_no_prompt_is_shared(monkeypatch):
    """A pass without a shared prompt tells flash attention its own name, by which it finds kernels.

    `install_packed_attention` registers another attention on top of it, under another name.
    """
    names = []

    def forward(query, *args, attn_implementation, **kwargs):
        names.append(attn_implementation)
        return query

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", forward)
    model = small_model("qwen2")
    model.config._attn_implementation = "flash_attention_2"
    install_packed_attention(model)
    model(torch.arange(6)[None])
    assert set(names) == {"flash_attention_2"}


def test_prompts_are_shared_only_where_that_saves_enough_tokens():
    """A prompt of 700 tokens is always shared.

    One of 64 is not where answers are long and of equal length: then there is little to save.
    """
    assert packing_pays(prompt_lengths=[700], completion_lengths=[[400] * 8])
    assert packing_pays(prompt_lengths=[700], completion_lengths=[[1024] * 8])
    assert packing_pays(prompt_lengths=[64], completion_lengths=[[1024] * 8])
    assert not packing_pays(prompt_lengths=[64], completion_lengths=[[4096] * 8])
    one_long_answer = [*[100] * 7, 4096]
    saves_padding = packing_pays(prompt_lengths=[64], completion_lengths=[one_long_answer])
    assert saves_padding, "padded rows would be mostly padding"


def test_rows_that_share_no_prompt_are_packed_only_to_save_padding():
    """Groups of one rollout are packed only if their prompts or answers differ in length.

    No prompt is computed less often then, but rows of unequal length are padded, and packed they
    are not.
    """
    assert packing_pays(prompt_lengths=[64, 64], completion_lengths=[[400], [100]])
    assert packing_pays(prompt_lengths=[64, 20], completion_lengths=[[100], [100]])
    assert not packing_pays(prompt_lengths=[64, 64], completion_lengths=[[400], [400]])


def test_neighbours_with_the_same_prompt_and_images_are_a_group():
    """Neighbouring rows are a group if both their prompts and their images are equal.

    Row 2 has another image than row 1, row 3 another prompt, and row 4 is not next to row 0.
    """
    ids = torch.tensor([[1, 2], [1, 2], [1, 2], [1, 3], [1, 2]])
    image_keys = ["a", "a", "b", "b", "a"]
    groups = group_rows_by_prompt(ids, torch.ones_like(ids), image_keys)
    assert groups == [[0, 1], [2], [3], [4]]


def test_groups_as_one_sequence_by_hand():
    """Prompt `5 6 7` has the rollouts `3` and `1 2 4`, and prompt `8` has `9 1`.

    The packed sequence is `5 6 7`, `1 2` of the longer rollout, then `8`, `9`. A rollout's last
    token predicts nothing and is left out, so nothing is left of the rollout `3`. The token 7
    predicts the first tokens of both rollouts. The first prompt's positions, 0 4 5, are those after
    an image.
    """
    ids = torch.tensor([[0, 5, 6, 7, 3, 0, 0], [0, 5, 6, 7, 1, 2, 4], [0, 0, 0, 8, 9, 1, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0]])
    positions = torch.tensor([[[0, 0, 4, 5], [0, 0, 0, 0]]] * 3)
    packed = pack_padded_rows(
        ids,
        attention_mask=mask,
        completion_width=3,
        groups=[[0, 1], [2]],
        prompt_position_ids=positions,
    )

    assert packed.ids_NS.tolist() == [[5, 6, 7, 1, 2, 8, 9]]
    assert packed.position_ids.shape == (3, 1, 7)
    assert packed.position_ids[2, 0].tolist() == [0, 4, 5, 6, 7, 0, 1]
    assert packed.layout.groups == (
        GroupLayout(prompt_length=3, rollout_lengths=(2,)),
        GroupLayout(prompt_length=1, rollout_lengths=(1,)),
    )
    assert packed.layout.predicting_positions.tolist() == [2, 3, 4, 2, 5, 6]
    assert packed.labels.tolist() == [[1, 2, 4, 3, 9, 1]]
    row_values = packed.spread_over_rows(torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]))
    expected_values = torch.tensor([[0.4, 0, 0], [0.1, 0.2, 0.3], [0.5, 0.6, 0]])
    assert torch.allclose(row_values, expected_values)


def test_a_truncated_rollout_that_is_masked_out_takes_no_place():
    """The first of two rollouts to the prompt `5 6` is masked out, and the second is `2 2`."""
    ids = torch.tensor([[5, 6, 1, 1], [5, 6, 2, 2]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    packed = pack_padded_rows(
        ids,
        attention_mask=mask,
        completion_width=2,
        groups=[[0, 1]],
        prompt_position_ids=torch.arange(2)[None],
    )
    assert packed.ids_NS.tolist() == [[5, 6, 2]]
    assert packed.labels.tolist() == [[2, 2]]
    assert packed.spread_over_rows(torch.tensor([[0.1, 0.2]])).tolist()[0] == [0.0, 0.0]


def test_a_batch_in_which_nothing_is_scored_keeps_a_position_for_the_head():
    """The head takes no empty tensor, so it computes a position, whose label -100 is ignored."""
    ids = torch.tensor([[5, 6, 1], [5, 6, 1]])
    packed = pack_padded_rows(
        ids,
        attention_mask=torch.tensor([[1, 1, 0]] * 2),  # both completions are masked out
        completion_width=1,
        groups=[[0, 1]],
        prompt_position_ids=torch.arange(2)[None],
    )
    assert packed.labels.tolist() == [[-100]]
    assert packed.layout.groups == (GroupLayout(prompt_length=2, rollout_lengths=()),)
    assert packed.spread_over_rows(torch.tensor([[9.0]])).tolist() == [[0.0], [0.0]]


def test_the_longest_rollout_is_one_span_with_its_prompt():
    """The spans of a group are its prompt with the longest rollout, and each other rollout.

    A span is what attends together. The queries of another rollout also see the prompt's keys.
    """
    one_rollout = GroupLayout(prompt_length=4, rollout_lengths=(2,))
    three_rollouts = GroupLayout(prompt_length=3, rollout_lengths=(5, 2, 1))
    no_rollout = GroupLayout(prompt_length=2, rollout_lengths=())
    layout = PackedLayout(
        (one_rollout, three_rollouts, no_rollout), torch.zeros(1, dtype=torch.long)
    )

    # 4 + 2; 3 + 5, then 2 and 1; 2.
    assert layout.span_lengths == [6, 8, 2, 1, 2]
    # Where spans begin and end: of queries, and of keys, which have the prompt's three once more
    # for the spans of 2 and of 1.
    queries, keys, max_queries, max_keys = layout.span_bounds
    assert queries.tolist() == [0, 6, 14, 16, 17, 19]
    assert keys.tolist() == [0, 6, 14, 19, 23, 25]
    assert max_queries == 8
    assert max_keys == 8


def test_dropout_is_found_in_the_attention_and_in_an_adapter():
    """A model has dropout if its attention or its adapter has it.

    Then two passes over the same tokens differ, so log-probabilities of the pass that is learned
    from are not those of the pass that sampled.
    """
    plain = Qwen2ForCausalLM(Qwen2Config(**TEXT_CONFIG, attention_dropout=0.0))
    attending = Qwen2ForCausalLM(Qwen2Config(**TEXT_CONFIG, attention_dropout=0.1))
    assert not has_dropout(plain)
    assert has_dropout(attending)
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    assert has_dropout(adapted)
