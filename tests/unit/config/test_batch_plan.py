"""The optimizer steps of a run are counted as Transformers takes them."""

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import Trainer
from trl.trainer.utils import RepeatSampler

from adora_vl.config.batch_plan import BatchLayout, total_optimizer_steps
from adora_vl.preflight.resolved_run import ResolvedRun

COUNTS = st.integers(min_value=1, max_value=6)
LAYOUTS = st.builds(
    BatchLayout,
    micro_batch_rows=COUNTS,
    num_generations=st.integers(min_value=2, max_value=4),
    steps_per_generation=COUNTS,
    num_iterations=st.integers(min_value=1, max_value=3),
    gradient_accumulation_steps=COUNTS,
    processes=st.integers(min_value=1, max_value=3),
)


def transformers_steps(layout: BatchLayout, rows: int, epochs: float) -> tuple[int, int]:
    """Return the optimizer steps of an epoch and of a run, from Transformers and TRL themselves."""
    order = RepeatSampler(
        range(rows),
        mini_repeat_count=layout.num_generations,
        batch_size=layout.prompts_per_generation,
        repeat_count=layout.num_iterations * layout.steps_per_generation,
    )
    # TRL's loader gives every process all rows of its part of a generation at once.
    micro_batches = len(order) // layout.generation_batch
    keys = SimpleNamespace(
        max_steps=-1,
        num_train_epochs=epochs,
        gradient_accumulation_steps=layout.gradient_accumulation_steps,
    )
    trainer = Mock(get_sp_size=lambda: 1, num_examples=len, get_total_train_batch_size=lambda _: 1)
    values: Any = Trainer.set_initial_training_values(trainer, keys, range(micro_batches))
    steps_of_epoch = values[1]
    steps_of_run = values[-1]
    return steps_of_epoch, steps_of_run


@given(LAYOUTS, st.integers(min_value=1, max_value=60), st.floats(min_value=0.125, max_value=3))
def test_a_dry_run_counts_the_steps_that_transformers_takes(layout, rows, epochs):
    """A dry run counts as many optimizer steps per epoch and run as Transformers takes.

    The last step of an epoch may accumulate over fewer generations, and is a step too.
    """
    assume(layout.generation_batch % layout.num_generations == 0)
    assume(rows >= layout.prompts_per_generation)
    keys = Mock(max_steps=-1, num_train_epochs=epochs)
    steps = (
        layout.optimizer_steps_per_epoch(rows),
        total_optimizer_steps(keys, layout, rows),
    )
    assert steps == transformers_steps(layout, rows, epochs)


@pytest.mark.parametrize("epochs", [0.5, 1, 1.5, 2])
@pytest.mark.parametrize("max_steps", [-1, 4])
def test_a_run_over_epochs_has_finished_with_its_last_step_and_not_before(
    tmp_path, epochs, max_steps
):
    """A checkpoint counts as the finished run at the last step of Transformers, and at none before.

    Without that, a finished run that is started again would take one step more than its epochs
    have.
    """
    layout = BatchLayout(
        micro_batch_rows=4,
        num_generations=4,
        steps_per_generation=1,
        num_iterations=1,
        gradient_accumulation_steps=2,
        processes=1,
    )
    rows = 11
    _, last_step = transformers_steps(layout, rows, epochs)
    if max_steps > 0:
        last_step = max_steps
    run = object.__new__(ResolvedRun)
    vars(run).update(
        request=Mock(config=Mock(max_steps=max_steps, num_train_epochs=epochs)),
        layout=layout,
        data=Mock(row_count=rows),
        output=Mock(start_point=Mock(checkpoint=str(tmp_path))),
    )
    for step in range(1, last_step + 1):
        (tmp_path / "manifest.json").write_text(json.dumps({"step": step}))
        assert run.finished_checkpoint == (tmp_path if step == last_step else None)
