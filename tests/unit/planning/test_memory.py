"""Sizes of the real models, sharding as accelerate says it, and the arithmetic of what fits."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from trl import ModelConfig, get_peft_config

from adora_vl.checkpoint.trl_state import SyncedReferenceModel
from adora_vl.config.batch_plan import build_batch_layout, subgroup_size
from adora_vl.config.sharding import (
    Sharding,
    sharding_from_environment,
    sharding_from_file,
    with_deepspeed,
)
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.shape import ModelShape, Tower, config_for_planning, model_shape
from adora_vl.planning.disk import (
    max_checkpoint_count,
    max_run_folder_bytes,
    predict_checkpoint_bytes,
)
from adora_vl.planning.engine_memory import (
    EngineMemorySettings,
    cache_bytes_per_token,
    engine_memory,
)
from adora_vl.planning.memory import (
    MemorySetup,
    PlannedMicroBatch,
    SharedComputation,
    frozen_tower_memory,
    predict_memory,
)
from adora_vl.planning.what_fits import (
    batch_sizes,
    fits_into_gpu,
    largest_batch,
    largest_image_tokens,
)
from adora_vl.training.model_states import REDUCE_BUCKET_PARAMETERS, predict_state_bytes
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import GIB
from benchmarks.gpu.setting import Setting
from benchmarks.measure import peak_bytes
from tests.support.stand_ins import training_config

ACCELERATE_CONFIGS = Path(__file__).parents[3] / "configs" / "accelerate"
SHARING_ALL = SharedComputation(images=True, vision=True, prompts=True)
NAME_OF_7B = "Qwen/Qwen2.5-VL-7B-Instruct"
NAME_OF_3B = "Qwen/Qwen2.5-VL-3B-Instruct"


@pytest.fixture(scope="module")
def shape_of_7b() -> ModelShape:
    """Return the sizes of Qwen2.5-VL-7B, from its config alone."""
    return model_shape(config_for_planning(NAME_OF_7B)[0])


def test_the_shipped_shapes_have_the_published_number_of_parameters(subtests):
    """Each case: a model, its parameters, whether embeddings are tied, a token's side in pixels.

    For Qwen2.5-VL 3B and 7B twice the number is the `total_size` of their
    model.safetensors.index.json in bfloat16, for Qwen3-VL and the 32B it is what public code
    quotes. That of the 72B is not from a source.
    """
    cases = [
        (NAME_OF_7B, 8_292_166_656, False, 28),
        (NAME_OF_3B, 3_754_622_976, True, 28),
        ("Qwen/Qwen2.5-VL-32B-Instruct", 33_452_718_336, False, 28),
        ("Qwen/Qwen2.5-VL-72B-Instruct", 73_410_777_344, False, 28),
        ("Qwen/Qwen3-VL-2B-Instruct", 2_127_532_032, True, 32),
        ("Qwen/Qwen3-VL-4B-Instruct", 4_437_815_808, True, 32),
        ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696, False, 32),
    ]
    for name, total, tied, side in cases:
        with subtests.test(name):
            config, note = config_for_planning(name)
            shape = model_shape(config)
            assert shape.total_parameters == total
            assert shape.ties_embeddings == tied
            assert shape.bytes_per_weight == 2
            assert "ships here" in note  # the tests are offline
            assert shape.image_token_pixels == side * side
            assert shape.patch_values == 3 * 2 * (side // 2) ** 2


def test_the_language_model_of_the_puzzles_has_the_published_number_of_parameters():
    config, note = config_for_planning("Qwen/Qwen2.5-7B-Instruct")
    shape = model_shape(config)
    assert shape.total_parameters == 7_615_616_512
    assert shape.ties_embeddings is False
    assert shape.vision is None
    assert "ships here" in note


def test_another_model_that_cannot_be_reached_is_named():
    with pytest.raises(UserError, match="nobody/nothing"):
        config_for_planning("nobody/nothing")


def test_the_tiny_model_is_counted_right():
    """The parameters that are counted from the tiny model's config are those of the model."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(PRETRAINED_FOLDER)
    shape = model_shape(AutoConfig.from_pretrained(PRETRAINED_FOLDER))
    assert (
        shape.total_parameters
        == sum(p.numel() for p in model.parameters())
        == shape.trained_parameters
    )
    assert shape.bytes_per_weight == 4


def test_zero3_does_not_shard_what_is_only_counted():
    """Parameters are counted right under ZeRO-3, which is switched on again after that.

    With ZeRO-3 on, Transformers would build the model in shards, whose parameters are empty.
    """
    from transformers.integrations import deepspeed

    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        assert deepspeed.is_deepspeed_zero3_enabled()
        shape = model_shape(AutoConfig.from_pretrained(PRETRAINED_FOLDER))
        assert deepspeed.is_deepspeed_zero3_enabled(), "and is on again"
    finally:
        deepspeed.unset_hf_deepspeed_config()
    assert (
        shape.total_parameters
        == json.loads((PRETRAINED_FOLDER / "build.json").read_text())["parameters"]
    )
    assert config


def test_freezing_and_lora_leave_fewer_to_train():
    """A frozen tower trains no parameter, and LoRA two matrices for each layer that it adapts."""
    config = config_for_planning(NAME_OF_3B)[0]
    frozen = model_shape(config, frozen=["vision_tower"])
    assert (
        frozen.trained_count_by_component["vision_tower"]
        == 0
        < frozen.trained_count_by_component["projector"]
    )
    lora = get_peft_config(
        ModelConfig(
            use_peft=True, lora_r=64, lora_target_modules=["q_proj", "gate_proj"], lora_alpha=128
        )
    )
    shape = model_shape(config, peft_config=lora, frozen=["vision_tower"])
    # 36 layers: q is 2048 x 2048, gate 2048 x 11008; rank 64
    assert shape.trained_parameters == 36 * 64 * (2048 + 2048 + 2048 + 11008)
    assert not shape.head_is_trained


def test_sharding_is_read_from_the_shipped_files():
    """Each config of accelerate has its number of processes, its stage and its offloading."""
    shardings = {
        path.stem: sharding_from_file(path, processes=None, machines=None)
        for path in ACCELERATE_CONFIGS.glob("*.yaml")
    }
    assert shardings["cpu"] == shardings["gpu1"] == Sharding(processes=1)
    assert shardings["zero2"] == Sharding(processes=8, zero_stage=2)
    assert shardings["zero3"] == Sharding(processes=8, zero_stage=3)
    assert shardings["zero3_offload"] == Sharding(processes=8, zero_stage=3, offload_optimizer=True)
    assert (
        sharding_from_file(ACCELERATE_CONFIGS / "zero3.yaml", processes=4, machines=None).processes
        == 4
    )
    with pytest.raises(
        UserError,
        match=r"cpu.yaml' has distributed_type: 'NO', with which accelerate starts one pro",
    ):
        sharding_from_file(ACCELERATE_CONFIGS / "cpu.yaml", processes=2, machines=None)
    assert "ZeRO-3, optimizer in host memory" in shardings["zero3_offload"].describe()


def test_sharding_is_read_from_what_accelerate_launch_tells(monkeypatch):
    """The variables that `accelerate launch` sets give the sharding; without them, one process.

    DeepSpeed's stage is 2 unless a variable says another, or the file that one names.
    """
    assert sharding_from_environment({"WORLD_SIZE": "4"}) == Sharding(processes=4)
    assert sharding_from_environment({}) == Sharding(processes=1)
    assert with_deepspeed(Sharding(processes=4, zero_stage=3), None) == Sharding(processes=4)
    assert with_deepspeed(Sharding(), DeepSpeedPlugin()) == Sharding(zero_stage=2)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    divided = with_deepspeed(Sharding(processes=4), DeepSpeedPlugin())
    assert divided == Sharding(processes=4, zero_stage=3, offload_optimizer=True)
    zero = {"stage": 1, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero})
    assert with_deepspeed(Sharding(), plugin) == Sharding(zero_stage=1, offload_parameters=True)


def test_an_accelerate_file_that_cannot_be_used(case_folder):
    """An accelerate config that cannot be used is refused with what is wrong in it.

    Each case: the content of the file, and a part of the error.
    """
    cases = [
        ("a: [", "not valid YAML"),
        ("[" * 3000, "nested too deeply"),
        ("5", "expected `key: value` lines, found int"),
        ("x: 1", "no num_processes"),
        ("num_processes: 2\ndistributed_type: FSDP", "FSDP"),
        (
            "num_processes: 2\ndistributed_type: 'NO'",
            "starts one process, and not 2; take configs/accelerate/zero2",
        ),
        ("num_processes: two", "a.yaml': num_processes: 'two' is not a whole number of at least 1"),
        ("num_processes: 0", "num_processes: 0 is not a whole number of at least 1"),
        (
            "num_processes: 2\ndistributed_type: DEEPSPEED\ndeepspeed_config: 5",
            "deepspeed_config: 5 is not a mapping of its options",
        ),
        (
            "num_processes: 2\ndistributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: x}",
            "zero_stage: 'x' is not a whole number",
        ),
    ]
    for content, message in cases:
        with case_folder(content) as folder:
            (folder / "a.yaml").write_text(content)
            with pytest.raises(UserError, match=message):
                sharding_from_file(folder / "a.yaml", processes=None, machines=None)


def test_zero_divides_what_its_stage_says(shape_of_7b):
    """ZeRO-2 divides gradients and optimizer among the processes, ZeRO-3 weights and reference too.

    In mixed precision a parameter has 2 bytes of weights, 2 of gradients and 12 of optimizer (arXiv
    1910.02054). One process without DeepSpeed has 4 bytes of optimizer.
    """
    total = shape_of_7b.total_parameters
    predicted_zero2 = predict_state_bytes(
        shape_of_7b, Sharding(processes=8, zero_stage=2), has_reference=True, mixed_precision=True
    )
    predicted_zero3 = predict_state_bytes(
        shape_of_7b, Sharding(processes=8, zero_stage=3), has_reference=True, mixed_precision=True
    )
    offloaded = predict_state_bytes(
        shape_of_7b,
        Sharding(processes=8, zero_stage=3, offload_optimizer=True),
        has_reference=True,
        mixed_precision=True,
    )
    assert predicted_zero2.weight_bytes == 2 * total
    assert predicted_zero2.reference_bytes == 2 * total
    assert predicted_zero2.optimizer_bytes == 12 * total // 8
    assert predicted_zero3.weight_bytes == 2 * total // 8
    assert predicted_zero3.reference_bytes == 2 * total // 8
    assert predicted_zero3.optimizer_bytes == 12 * total // 8
    assert (
        predicted_zero2.gradient_bytes
        == predicted_zero3.gradient_bytes
        # a process's part of the gradients, and DeepSpeed's buckets in which they are summed
        == 2 * total // 8 + 2 * REDUCE_BUCKET_PARAMETERS
    )
    assert offloaded.optimizer_bytes == 0
    # the 12 of the optimizer, and the gradients twice: 2 as they come and 4 in float32
    assert offloaded.host_optimizer_bytes == 18 * total // 8
    for sharding in (
        Sharding(processes=8),
        Sharding(processes=8, zero_stage=3),
    ):
        with_adapters = predict_state_bytes(
            replace(shape_of_7b, has_adapters=True),
            sharding,
            has_reference=True,
            mixed_precision=True,
        )
        assert with_adapters.reference_bytes == 0, "TRL takes the adapters off for it"
    one_process = predict_state_bytes(
        shape_of_7b, Sharding(processes=1), has_reference=False, mixed_precision=True
    )
    assert one_process.weight_bytes == 2 * total
    assert one_process.gradient_bytes == 2 * total
    assert one_process.optimizer_bytes == 4 * total
    assert one_process.reference_bytes == 0


def test_torchs_own_optimizer_is_what_is_predicted():
    """The predicted gradients and AdamW states are as large as the tiny model's after a step."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(PRETRAINED_FOLDER)
    shape = model_shape(AutoConfig.from_pretrained(PRETRAINED_FOLDER))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state_bytes = sum(
        t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim
    )
    gradients = sum(p.grad.nbytes for p in model.parameters())
    predicted = predict_state_bytes(
        shape, Sharding(processes=1), has_reference=False, mixed_precision=False
    )
    assert predicted.optimizer_bytes == state_bytes
    assert predicted.gradient_bytes == gradients
    predicted_ddp = predict_state_bytes(
        shape, Sharding(processes=2), has_reference=False, mixed_precision=False
    )
    assert (predicted_ddp.optimizer_bytes, predicted_ddp.gradient_bytes) == (
        state_bytes,
        2 * gradients,
    ), "what DDP sends lies in buckets of its own"


def test_a_checkpoint_on_disk_is_as_large_as_predicted(tmp_path):
    """A saved checkpoint of the tiny model is as large as predicted, or up to 3 MiB smaller."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(PRETRAINED_FOLDER)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    shape = model_shape(AutoConfig.from_pretrained(PRETRAINED_FOLDER))
    predicted = predict_checkpoint_bytes(training_config(), shape, Sharding())
    assert written <= predicted <= written + 3 * 2**20
    largest = max_run_folder_bytes(predicted, 10, checkpoint_count=2, record_gb=1.5)
    assert largest == 2 * predicted + 10 + 1_500_000_000, "with a full record of the rollouts"
    SyncedReferenceModel(model, moves=True, is_main=True, gather=nullcontext).save(tmp_path)
    reference_bytes = sum(path.stat().st_size for path in (tmp_path / "reference").iterdir())
    predicted_with_reference = predict_checkpoint_bytes(
        training_config(sync_ref_model=True), shape, Sharding()
    )
    assert reference_bytes == pytest.approx(predicted_with_reference - predicted, rel=0.01)


def test_a_folder_has_no_more_checkpoints_than_a_run_writes():
    """The most checkpoints on disk are `save_total_limit` and one more, or all that the run writes.

    One more, since the oldest goes only after the new one is written.
    """

    def most_checkpoints(rows: int | None = None, **keys: object) -> int | None:
        """The most checkpoints that a run has on disk; 4 rows make a step and a generation."""
        config = training_config(
            num_generations=4,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            **keys,
        )
        return max_checkpoint_count(config, build_batch_layout(config, processes=1), rows)

    ten_steps = {"max_steps": 10, "save_steps": 4}
    assert most_checkpoints(**ten_steps, save_total_limit=2) == 3
    assert most_checkpoints(**ten_steps, save_total_limit=3) == 3, "after steps 4, 8 and 10"
    assert most_checkpoints(**ten_steps, save_total_limit=50) == 3
    assert most_checkpoints(**ten_steps) == 3
    assert most_checkpoints(**ten_steps, save_strategy="no") == 0
    assert most_checkpoints(num_train_epochs=3, save_steps=500) is None, "the rows are not known"
    assert most_checkpoints(num_train_epochs=3, save_steps=500, save_total_limit=5) == 6
    assert most_checkpoints(rows=40, num_train_epochs=3, save_strategy="epoch") == 3
    # an epoch has 10 steps: after steps 10, 20 and 25
    assert most_checkpoints(rows=40, max_steps=25, save_strategy="epoch") == 3, (
        "the last is not whole"
    )
    assert (
        most_checkpoints(rows=40, num_train_epochs=3, save_strategy="epoch", save_total_limit=1)
        == 2
    )


def test_keys_and_values_of_the_7b_take_56_kib_a_token(shape_of_7b):
    """A token of the 7B takes 56 KiB of the engine's cache, which limits how many rollouts run.

    There are keys and values of 28 layers with 4 heads of 128 numbers, in 2 bytes each. With a
    share of 0.2 the weights leave no cache.
    """
    assert cache_bytes_per_token(shape_of_7b, 2) == 2 * 28 * 4 * 128 * 2 == 56 * 1024
    assert cache_bytes_per_token(shape_of_7b, 2, 8) == 14 * 1024, (
        "each of eight cards has one of the four heads"
    )
    memory = engine_memory(
        shape_of_7b,
        EngineMemorySettings(utilization=0.4, dtype_bytes=2, max_length=8192, max_sequences=128),
        80 * GIB,
    )
    assert (
        memory.cache_bytes
        == int(0.4 * 80 * GIB) - 2 * shape_of_7b.total_parameters - memory.workspace_bytes
    )
    assert memory.concurrent_rollouts == memory.cache_bytes // (56 * 1024 * 8192)
    too_small = engine_memory(
        shape_of_7b,
        EngineMemorySettings(utilization=0.2, dtype_bytes=2, max_length=8192, max_sequences=128),
        80 * GIB,
    )
    assert too_small.concurrent_rollouts == 0


@pytest.fixture(scope="module")
def plan_recipe(shape_of_7b) -> MemorySetup:
    """The memory setup of adora_7b_geo3k.yaml on zero3_offload.yaml; prompts have 1,580 tokens."""
    engine = EngineMemorySettings(
        utilization=0.4, dtype_bytes=2, max_length=8192, max_sequences=128, sleeps=True
    )
    return MemorySetup(
        shape_of_7b,
        Sharding(processes=8, zero_stage=3, offload_optimizer=True),
        PlannedMicroBatch(
            sequences=2, prompt_tokens=1580, completion_tokens=4096, image_tokens=1280
        ),
        128,
        has_reference=True,
        engine=engine,
    )


def test_what_saves_memory_saves_memory(plan_recipe, subtests):
    """Each change of the recipe takes more memory in the forward and backward passes.

    It gives up checkpointing or sharding, or has larger batches.
    """
    cases: list[Any] = [
        {"checkpointing": False},
        {"sharding": Sharding(processes=8, zero_stage=2)},
        {"sharding": Sharding(processes=1)},
        {
            "batch": PlannedMicroBatch(
                sequences=4, prompt_tokens=1580, completion_tokens=4096, image_tokens=1280
            )
        },
        {"sequences_per_generation": 512},
    ]
    for changes in cases:
        with subtests.test(f"{changes!r:.80}"):
            memory_before = predict_memory(plan_recipe, 80 * GIB).phases["forward and backward"]
            memory_after = predict_memory(replace(plan_recipe, **changes), 80 * GIB).phases[
                "forward and backward"
            ]
            assert sum(memory_after.values()) > sum(memory_before.values())


def test_an_engine_that_stays_awake_takes_its_share_while_learning(plan_recipe):
    """An engine that does not sleep raises the peak, since its cache stays during the steps."""
    awake = replace(plan_recipe, engine=replace(plan_recipe.engine, sleeps=False))
    gained = (
        predict_memory(awake, 80 * GIB).peak_bytes
        - predict_memory(plan_recipe, 80 * GIB).peak_bytes
    )
    assert gained > 0
    assert "KV cache" in predict_memory(awake, 80 * GIB).phases["optimizer step"]


def test_the_largest_batch_fits_keeps_groups_together_and_the_next_one_does_not_fit(
    plan_recipe, subtests
):
    """The largest batch is the last one that fits of those which suit the groups; 20 GiB fit none.

    They divide the 128 rollouts of a process, and are whole groups of 8 or parts of one.
    """
    for sharing, card in product([SharedComputation(), SHARING_ALL], [48, 60, 80, 140]):
        with subtests.test(f"{sharing!r:.80} {card}"):
            setup = replace(plan_recipe, group_size=8, sharing=sharing)
            sizes = batch_sizes(setup)
            assert sizes == [1, 2, 4, 8, 16, 32, 64, 128]
            largest = largest_batch(setup, card * GIB)
            for size in sizes:
                fitting = fits_into_gpu(
                    replace(setup, batch=replace(setup.batch, sequences=size)), card * GIB
                )
                assert fitting is (size <= largest)
            assert largest_batch(setup, 20 * GIB) == 0


@given(group_size=st.integers(2, 16), groups=st.integers(1, 20))
def test_no_batch_that_is_advised_breaks_groups_up_more_than_it_must(group_size, groups):
    """An advised batch has whole groups, or is a part of one that divides it evenly.

    Otherwise a group would be computed in more parts: one of 8 in batches of 7 has 8 parts.
    """
    tower = Tower(layers=1, width=1, heads=1, kv_heads=1, head_size=1, mlp_width=1)
    shape = ModelShape(
        parameter_count_by_component={},
        trained_count_by_component={},
        text=tower,
        vocabulary_size=1,
        ties_embeddings=False,
        bytes_per_weight=2,
        largest_tensor_parameters=1,
        head_is_trained=True,
    )
    setup = MemorySetup(
        shape,
        Sharding(),
        PlannedMicroBatch(sequences=1, prompt_tokens=1, completion_tokens=1),
        sequences_per_generation=group_size * groups,
        group_size=group_size,
    )
    sizes = batch_sizes(setup)
    assert {1, group_size, group_size * groups} <= set(sizes)
    for size in sizes:
        assert subgroup_size(size, group_size) == min(size, group_size)
        assert (group_size * groups) % size == 0


def test_the_batches_of_a_huge_generation_are_listed_at_once():
    """Batch sizes of a generation of 10 ** 20 rollouts are listed at once, up to 100,000.

    Such a number is a typing error, which the dry run has to report soon.
    """
    setup = MemorySetup(
        ModelShape({}, {}, Tower(1, 1, 1, 1, 1, 1), 1, False, 2, 1, True),
        Sharding(),
        PlannedMicroBatch(sequences=1, prompt_tokens=1, completion_tokens=1),
        10**20,
        group_size=8,
    )
    sizes = batch_sizes(setup)
    assert sizes[:4] == [1, 2, 4, 8]
    assert sizes[-1] == 100_000


def test_a_group_has_one_image_where_its_rollouts_are_together(plan_recipe):
    """Rollouts of a group that share a micro-batch share its image, which takes less memory.

    Here a micro-batch is a whole group of 8.
    """
    one_by_one = replace(plan_recipe, batch=replace(plan_recipe.batch, sequences=8), group_size=8)
    shared = replace(one_by_one, sharing=SHARING_ALL)
    memory_before = predict_memory(one_by_one, 80 * GIB).phases["forward and backward"]
    memory_after = predict_memory(shared, 80 * GIB).phases["forward and backward"]
    # an eighth of the images, each in bytes with one of two frames in place of float32 numbers
    assert memory_after["pixels"] * 8 * 8 == memory_before["pixels"]
    assert memory_after["vision"] * 8 == memory_before["vision"]
    assert memory_after["activations"] < memory_before["activations"], (
        "the prompt of a group is computed once"
    )
    # the rollouts of a micro-batch, and the images of the parts of groups of 8 in it
    for sequences, images in (
        (2, 1),
        (4, 1),
        (7, 7),
        (12, 3),
        (16, 2),
    ):
        setup = replace(shared, batch=replace(shared.batch, sequences=sequences))
        assert setup.pass_size.image_patches == images * 1280 * 4


def test_a_frozen_tower_counts_its_passes_over_the_images_of_a_generation(plan_recipe):
    """A frozen vision tower sees the images before the training pass, three at a time.

    The 16 images of a generation have 1,280 tokens each, 81,920 patches together. A trained tower
    has no such passes.
    """
    one_by_one = replace(
        plan_recipe,
        batch=replace(plan_recipe.batch, sequences=8),
        group_size=8,
        sharing=SHARING_ALL,
    )
    assert "frozen vision tower" not in predict_memory(one_by_one, 80 * GIB).phases
    shape_with_frozen_tower = replace(
        one_by_one.shape,
        trained_count_by_component={
            **one_by_one.shape.trained_count_by_component,
            "vision_tower": 0,
            "projector": 0,
        },
    )
    setup = replace(one_by_one, shape=shape_with_frozen_tower)
    phases = predict_memory(setup, 80 * GIB).phases
    feature_bytes = 16 * 1280 * 3584 * 2
    assert (
        phases["frozen vision tower"]["image features"]
        == phases["forward and backward"]["image features"]
        == feature_bytes
    )
    assert "vision" not in phases["forward and backward"], "a pass without gradients keeps nothing"
    patches = phases["frozen vision tower"]["vision"]
    assert 1.0 * GIB < patches < 1.3 * GIB, "and not 6 GiB, as for all at once"
    scattered = replace(setup, sharing=replace(SHARING_ALL, keeps_groups=False))
    assert (
        predict_memory(scattered, 80 * GIB).phases["frozen vision tower"]
        == (phases["frozen vision tower"])
    ), "wherever the rollouts of an image are"
    assert setup.pass_size.is_packed
    assert not scattered.pass_size.is_packed, "no two rollouts of a prompt are together"
    larger = replace(setup, sequences_per_generation=2 * setup.sequences_per_generation)
    assert predict_memory(larger, 80 * GIB).phases["frozen vision tower"]["vision"] == patches


@pytest.mark.slow
def test_a_pass_of_the_frozen_7b_tower_holds_what_is_predicted_at_most():
    """A pass of the 7B's vision tower without gradients takes the predicted memory, or less.

    Two of its layers see an image of 1,024 patches.
    """
    tower = Setting(full=True, device=torch.device("cpu")).config("7B", layers=1, eye_layers=2)
    shape = model_shape(tower, dtype="bfloat16", frozen=("vision_tower", "projector"))
    tower.vision_config._attn_implementation = "sdpa"
    vision_tower = Qwen2_5_VisionTransformerPretrainedModel(tower.vision_config).bfloat16()
    pixels = torch.randn(1024, 1176)
    grid = torch.tensor([[1, 32, 32]])
    with torch.no_grad():
        measured = peak_bytes(
            torch.device("cpu"), lambda: vision_tower(torch.cat([pixels]).bfloat16(), grid_thw=grid)
        )
    setup = MemorySetup(
        shape,
        Sharding(),
        PlannedMicroBatch(sequences=1, prompt_tokens=300, completion_tokens=10, image_tokens=256),
        1,
        sharing=SHARING_ALL,
    )
    predicted = frozen_tower_memory(setup).pass_bytes
    assert measured <= predicted <= 1.7 * measured


def test_a_packed_group_has_its_prompt_once(plan_recipe):
    """A group in one packed sequence has the tokens of its prompt once, and takes less memory.

    It has 8 rollouts, with a prompt of 1,580 tokens and answers of 200.
    """
    one_sequence_each = replace(
        plan_recipe,
        batch=PlannedMicroBatch(
            sequences=8, prompt_tokens=1580, completion_tokens=200, image_tokens=1280
        ),
        group_size=8,
    )
    packed = replace(one_sequence_each, sharing=SHARING_ALL)
    assert packed.pass_size.is_packed
    assert packed.pass_size.tokens == 1580 + 8 * 199 < one_sequence_each.pass_size.tokens
    memory_before = predict_memory(one_sequence_each, 80 * GIB).phases["forward and backward"]
    memory_after = predict_memory(packed, 80 * GIB).phases["forward and backward"]
    assert memory_after["activations"] < memory_before["activations"] / 2
    assert "attention mask" in memory_before, "attention in two parts stores no mask"
    assert "attention mask" not in memory_after, "attention in two parts stores no mask"


def test_the_largest_image_leaves_the_engine_room_for_the_completion(plan_recipe):
    """The engine's 8,192 tokens hold 4,096 of the completion, and 300 of the prompt's text."""
    tokens = largest_image_tokens(plan_recipe, 80 * GIB)
    assert tokens == 8192 - 4096 - 300  # the engine's length is the limit here
    tight = largest_image_tokens(replace(plan_recipe, engine=None, checkpointing=False), 80 * GIB)
    assert 0 < tight < 16384


def test_the_dry_run_recomputes_as_few_layers_as_leave_a_tenth_free(plan_recipe, subtests):
    """With `recompute: auto` the fewest layers are recomputed that leave a tenth of the card free.

    So a larger card recomputes fewer. A run that fits with all layers recomputed also fits with the
    chosen number.
    """
    chosen = replace(plan_recipe, recompute="auto")
    layers = plan_recipe.shape.text.layers
    recomputed_layers = []
    for gigabytes in range(20, 400, 20):
        card = gigabytes * GIB
        fewest = predict_memory(chosen, card)
        all_layers = predict_memory(plan_recipe, card)
        recomputed_layers.append(fewest.recomputed_layers)
        with subtests.test(gigabytes):
            assert all_layers.recomputed_layers == layers
            learning = fewest.phases["forward and backward"]
            if fewest.recomputed_layers < layers:
                assert sum(learning.values()) - learning["fragmentation"] <= 0.9 * card
            assert fits_into_gpu(chosen, card) == fits_into_gpu(plan_recipe, card)
    assert recomputed_layers == sorted(recomputed_layers, reverse=True), (
        "larger cards, fewer layers"
    )
    assert recomputed_layers[0] == layers
    assert recomputed_layers[-1] == 0
    assert predict_memory(replace(plan_recipe, recompute=5), 80 * GIB).recomputed_layers == 5
    assert predict_memory(replace(plan_recipe, recompute=99), 80 * GIB).recomputed_layers == layers
    assert predict_memory(replace(chosen, on_gpu=False), 400 * GIB).recomputed_layers == layers
    assert predict_memory(replace(chosen, checkpointing=False), 80 * GIB).recomputed_layers == 0
