"""What a checkpoint keeps of a generation that was learned from in part."""

import json
from types import SimpleNamespace
from typing import Any

import torch

from adora_vl.checkpoint.store import MANIFEST_FILE
from adora_vl.packing.image_store import ImageBanks
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.unfinished import RestoredGeneration, UnfinishedGeneration
from tests.support.step_context import step_context


def test_images_and_micro_batches_are_read_back_into_a_new_bank(tmp_path):
    """A checkpoint restores the micro-batches that were not learned from, and their images.

    The generation has two micro-batches with the same image of four patches. The first was learned
    from before the checkpoint, so only the second is restored.
    """
    context = step_context(
        per_device_train_batch_size=4,
        num_generations=4,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
    )
    banks = ImageBanks()
    patches = torch.arange(12, dtype=torch.uint8).view(4, 3)
    patch_numbers = banks.new("train").store("digest", patches, torch.tensor([1, 2, 2]))
    micro_batch: Any = {"pixel_values": patch_numbers, "completion_ids": torch.ones(4, 2)}
    saved = UnfinishedGeneration(context, banks)
    entry = saved.save(tmp_path, micro_step=1, micro_batches=[micro_batch, micro_batch], table="")
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(entry))
    new_banks = ImageBanks()
    # One patch of an evaluation is there already, so the restored ones are numbered from 1.
    new_banks.new("eval").store("another", patches[:1], torch.tensor([1, 1, 1]))
    restored = UnfinishedGeneration(context, new_banks).load(tmp_path)

    assert restored is not None
    assert restored.micro_step == 1
    learned, remaining = restored.micro_batches
    assert learned == {}, "it was learned from"
    assert remaining["pixel_values"].flatten().tolist() == [1, 2, 3, 4], "behind the other bank's"
    bank = new_banks.of_training()
    assert bank is not None
    assert torch.equal(bank.image(1).patches, patches)
    assert bank.image(1).key == "digest"


def test_a_resumed_run_forgets_the_restored_micro_batches_at_its_next_generation():
    """Restored micro-batches are learned from, and replaced by those of the next generation.

    If they were kept, they would take memory of the GPU until the end of the run. The run resumes
    at the second of two micro-batches, and the generation after it is sampled.
    """
    context = step_context(
        per_device_train_batch_size=8, steps_per_generation=2, gradient_accumulation_steps=1
    )
    restored_batches: list[Any] = [{}, {"completion_ids": "restored"}]
    restored = RestoredGeneration(micro_step=1, micro_batches=restored_batches, table="")
    trainer: Any = object.__new__(AdoraGRPOTrainer)
    trainer.args = context.config
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(sync_gradients=False)
    trainer.parts = SimpleNamespace(
        context=context,
        checkpoint_writer=SimpleNamespace(),
        checkpoint_state=SimpleNamespace(restore=lambda folder: restored),
        generation_logps=SimpleNamespace(check_shared_prompts=lambda batch: None),
    )
    trainer._sample_generation = lambda rows: [{"completion_ids": "new"}, {}]
    trainer.restore("checkpoint-1")

    assert trainer._prepare_inputs([]) == {"completion_ids": "restored"}
    trainer._step = 2  # the number of the next generation's first micro-batch
    assert trainer._prepare_inputs([]) == {"completion_ids": "new"}
    assert trainer._buffered_inputs == [{"completion_ids": "new"}, {}]
