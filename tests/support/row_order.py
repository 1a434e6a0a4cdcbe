"""The order in which a run draws the rows of a data set."""

from datasets import Dataset

from adora_vl.data.dataloader import EpochRepeatSampler


def row_ids_of_epochs(rows: Dataset, epochs: range) -> list[str]:
    """List the rows' ids in the order in which a run draws them."""
    sampler = EpochRepeatSampler(
        rows, mini_repeat_count=2, batch_size=4, repeat_count=1, shuffle=True, seed=3
    )
    ids = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        ids += [rows[index]["id"] for index in sampler]
    return ids
