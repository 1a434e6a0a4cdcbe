"""Every line of a run that stops says in the same words in which step, why, and how it goes on."""

from pathlib import Path

from adora_vl.utils.stop_message import stop_message_with_checkpoint


def test_a_run_that_stops_before_a_step_names_the_step_the_remedy_and_the_checkpoint():
    """Two steps are done, so that the third is named; a reason may bring its own remedy."""
    line = stop_message_with_checkpoint(
        2, "row 7 is broken", remedy="Mend it", checkpoint=Path("run/checkpoint-2")
    )
    assert line == (
        "step 3: row 7 is broken. Nothing of this step was applied. Mend it, and go on with "
        "--resume_from_checkpoint run/checkpoint-2"
    )
    with_remedy = stop_message_with_checkpoint(
        0, "the key has ended; renew it", checkpoint="run/checkpoint-0"
    )
    assert with_remedy == (
        "step 1: the key has ended; renew it, and go on with --resume_from_checkpoint "
        "run/checkpoint-0"
    )
