"""The next generation's images are ready when it begins, and nothing else about the run is
different.
"""

import json
import random
import shutil
import threading
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List
from PIL import Image as Pillow
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.dataloader import (
    ROW_NUMBER_COLUMN,
    DistinctRows,
    EpochRepeatSampler,
    ImagePrefetch,
    NoPrefetch,
)
from adora_vl.data.loading import only_decodes_rows, with_decoded_images
from adora_vl.packing.images import DistinctImages
from adora_vl.trainer import AdoraGRPOTrainer
from tests.support.stand_ins import training_config
from tests.support.tiny_run import TINY_RUN_STEPS, train_tiny_run


class RecordingDataset:
    """A data set that notes which thread has read which row; reading some rows raises an error."""

    def __init__(self, rows: int, broken: tuple[int, ...] = ()) -> None:
        self.rows = rows
        self.broken = broken
        self.read = list[tuple[str, int]]()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append((threading.current_thread().name, index))
        if index in self.broken:
            raise OSError(f"row {index}")
        return {"id": index, "images": [Pillow.new("RGB", (4, 4), (index, 0, 0))]}


class ProcessedRows(list[int]):
    """Stands in for the image cache: the list of the rows that were processed."""

    size = 1  # bytes of each row in the cache

    def __call__(self, row: dict[str, Any]) -> int:
        self.append(row["id"])
        return self.size


class PairsInOrder(EpochRepeatSampler):
    """A sampler whose generations are rows 0 and 1, rows 2 and 3, and so on."""

    def __init__(self) -> None:
        super().__init__([0], 1)

    def following(self, rows: Any, epoch: int, generations: int = 1) -> list[int]:
        return [row + 2 * generations for row in rows]


class FinishingPrefetch(ImagePrefetch):
    """A prefetch that finishes all rows before it stops, so that its work is always the same."""

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        super().finish()


def test_a_row_says_its_number_where_that_is_asked_for():
    """Row 5 was read ahead, and 3 is read when it is asked for."""
    rows = DistinctRows(RecordingDataset(8), numbered=True)
    rows.read_ahead(5)
    assert [row[ROW_NUMBER_COLUMN] for row in rows.__getitems__([3, 3, 5])] == [3, 3, 5]
    assert ROW_NUMBER_COLUMN not in DistinctRows(RecordingDataset(8))[3]


def test_the_loader_finds_the_next_rows_read_and_their_images_processed():
    """While the generation of rows 0 and 1 is at work, rows 2 and 3 are read in another thread."""
    stored = RecordingDataset(8)
    processed = ProcessedRows()
    rows = DistinctRows(stored)
    prefetch = FinishingPrefetch(
        rows, sampler=PairsInOrder(), process_images=processed, limit_bytes=100
    )
    rows.__getitems__([0, 0, 1, 1])
    prefetch.start()
    prefetch.finish()
    assert processed == [0, 1, 2, 3], (
        "the last batch first: the loader may be ahead of the generation"
    )
    read_rows = rows.__getitems__([2, 2, 3, 3])
    assert [row["id"] for row in read_rows] == [2, 2, 3, 3]
    assert read_rows[0]["images"][0] is read_rows[1]["images"][0]
    main = threading.current_thread().name
    assert stored.read == [(main, 0), (main, 1), ("prefetch", 2), ("prefetch", 3)]


def test_a_row_that_was_read_for_a_request_ahead_is_not_read_again():
    """Rows that `rows_after` has read for servers that sample ahead are not read a second time.

    It returns the rows of the next generation.
    """
    stored = RecordingDataset(8)
    rows = DistinctRows(stored, numbered=True)
    prefetch = FinishingPrefetch(
        rows, sampler=PairsInOrder(), process_images=lambda row: 1, limit_bytes=100
    )
    for batch in ([0, 0, 1, 1], [2, 2, 3, 3]):
        rows.__getitems__(batch)
        assert [row["id"] for row in rows.rows_after(PairsInOrder(), batch, 1)] == [
            number + 2 for number in batch
        ]
        prefetch.start()
        prefetch.finish()
    assert sorted(index for _, index in stored.read) == [0, 1, 2, 3, 4, 5]


def test_rows_that_nobody_asked_for_are_let_go():
    """Rows that were read ahead are let go if the loader takes others.

    It takes rows 6 and 7 in place of 2 and 3.
    """
    rows = DistinctRows(RecordingDataset(8))
    prefetch = FinishingPrefetch(
        rows, sampler=PairsInOrder(), process_images=lambda row: 1, limit_bytes=100
    )
    for batch in ([0, 1], [6, 7]):
        rows.__getitems__(batch)
        prefetch.start()
        prefetch.finish()
        assert len(rows._ahead_rows) <= 2


def test_an_unreadable_row_is_passed_over_and_met_again_by_the_loader():
    """A prefetch passes over rows that raise; the loader meets the error when it reads the row.

    Row 2 cannot be read, and row 1 cannot be processed.
    """
    stored = RecordingDataset(8, broken=(2,))
    processed = ProcessedRows()
    rows = DistinctRows(stored)

    def process(row: dict[str, Any]) -> int:
        if row["id"] == 1:
            raise ValueError("no image")
        return processed(row)

    prefetch = FinishingPrefetch(
        rows, sampler=PairsInOrder(), process_images=process, limit_bytes=100
    )
    rows.__getitems__([0, 1])
    prefetch.start()
    prefetch.finish()
    assert processed == [0, 3]
    with pytest.raises(OSError, match="row 2"):
        rows.__getitems__([2, 3])


def test_it_stops_at_what_the_cache_holds_and_where_the_next_generation_begins():
    """A prefetch stops when its rows fill the cache, and `finish` ends it after the current row.

    Two pictures of 60 bytes exceed the limit of 100 bytes.
    """
    processed = ProcessedRows()
    processed.size = 60
    rows = DistinctRows(RecordingDataset(8))
    rows.__getitems__([0, 1])
    prefetch_with_full_cache = FinishingPrefetch(
        rows, sampler=PairsInOrder(), process_images=processed, limit_bytes=100
    )
    prefetch_with_full_cache.start()
    prefetch_with_full_cache.finish()
    assert processed == [0, 1], "120 of 100 bytes"

    row_begun = threading.Event()

    def until_asked(row: dict[str, Any]) -> int:
        row_begun.set()
        assert prefetch_until_asked._should_stop.wait(60)
        return processed(row)

    prefetch_until_asked = ImagePrefetch(rows, PairsInOrder(), until_asked, 100)
    processed.clear()
    prefetch_until_asked.start()
    assert row_begun.wait(60)
    prefetch_until_asked.finish()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]
    assert processed == [0], "it did not go on to the next row"


def test_what_follows_is_what_the_sampler_gives_next(subtests):
    """`following` gives the rows of a process's next generation, also over the end of an epoch.

    11 rows make five generations of two, with three rollouts each.
    """
    for shuffle, processes in product([True, False], [1, 2]):
        with subtests.test(f"{shuffle} {processes}"):
            sampler = EpochRepeatSampler(
                range(11),
                mini_repeat_count=3,
                batch_size=2,
                repeat_count=4,
                shuffle=shuffle,
                seed=7,
            )
            generations = []
            size = 6 // processes
            for epoch in (0, 1):
                sampler.set_epoch(epoch)
                drawn_indices = list(sampler)
                # 2 rows x 3 rollouts, of which each generation comes four times
                for start in range(0, len(drawn_indices), 2 * 3 * 4):
                    parts = [
                        drawn_indices[start + size * rank :][:size] for rank in range(processes)
                    ]
                    generations.append((epoch, [list(dict.fromkeys(part)) for part in parts]))
            assert len(generations) == 2 * 5
            for (epoch, now), (_, then) in pairwise(generations):
                assert [sampler.following(rows, epoch) for rows in now] == then
            assert sampler.following([], 0) == sampler.following([99], 0) == []


def test_asking_what_follows_disturbs_neither_the_sampler_nor_any_random_state():
    """`following` changes neither what the sampler draws next nor any global random state."""
    options = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 1, "seed": 7}
    sampler = EpochRepeatSampler(range(9), shuffle=True, **options)
    undisturbed = EpochRepeatSampler(range(9), shuffle=True, **options)
    states_before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    iterator = iter(sampler)
    sampler.following([0], 0)
    first_draw = [next(iterator)]
    sampler.following([0], 1)
    assert [*first_draw, *iterator] == list(undisturbed)
    assert torch.equal(states_before[0], torch.get_rng_state())
    assert states_before[1:] == (repr(np.random.get_state()), random.getstate())


def test_rows_are_read_ahead_only_where_reading_one_is_decoding_it():
    """Rows are read ahead only from a data set that does nothing but decode them.

    A transform of the user's may draw random numbers, so it must be called in order.
    """
    plain = Dataset.from_dict({"images": [[]]}, features=Features({"images": List(Image())}))
    assert only_decodes_rows(plain)
    assert only_decodes_rows(with_decoded_images(plain))
    assert not only_decodes_rows(plain.with_transform(lambda rows: rows)), (
        "it may draw a random crop"
    )
    assert not only_decodes_rows(RecordingDataset(1))
    assert not only_decodes_rows([])


def test_images_are_prefetched_on_a_gpu_with_a_cache_and_without_workers(subtests):
    """Each case: changed settings, the device, and whether images are prefetched."""
    cases: list[Any] = [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"dataloader_num_workers": 2}, "cuda", False),
        ({"cache": None}, "cuda", False),
        ({"shown": False}, "cuda", False),
        ({"dataset": []}, "cuda", False),
    ]
    for changed_keys, device, expected in cases:
        with subtests.test(f"{changed_keys!r:.80} {device} {expected}"):
            settings: dict[str, Any] = {
                "dataloader_num_workers": 0,
                "cache": SimpleNamespace(limit_bytes=1),
            }
            settings |= {"shown": True, "dataset": Dataset.from_dict({"id": [1]}), **changed_keys}
            images: Any = SimpleNamespace(
                cache=settings["cache"],
                may_be_shown=settings["shown"],
                cache_images=len,
                _config=training_config(dataloader_num_workers=settings["dataloader_num_workers"]),
                _device=torch.device(device),
            )
            prefetch = DistinctImages.prefetch(
                images, DistinctRows([]), PairsInOrder(), settings["dataset"]
            )
            assert isinstance(prefetch, ImagePrefetch) == expected
            assert isinstance(prefetch, NoPrefetch)


def logged_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the steps in the log, without the times."""
    # parts of the keys whose values depend on the machine's speed or memory
    timed = ("seconds", "time", "runtime", "per_second", "/ms_", "mb", "MB")
    steps = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        # the line at the end has the mean loss of one command, not of the run
        if line["kind"] == "end":
            continue
        for key in list(line):
            if any(word in key for word in timed):
                del line[key]
        steps.append(line)
    return steps


@pytest.mark.slow
def test_a_resumed_run_takes_the_same_steps_with_it(adora_run, tmp_path, monkeypatch):
    """A run that resumes with the prefetch of images logs the same steps as one without it.

    `adora_run` was made without. A copy loses its last checkpoint, and goes on from checkpoint-2
    with the prefetch, which a CPU does not have otherwise.
    """
    images_by_thread: Counter[str] = Counter()
    preprocess = Qwen2VLImageProcessor.preprocess

    def counted(self: Any, images: Any, **settings: Any) -> Any:
        images_by_thread[threading.current_thread().name] += len(images)
        return preprocess(self, images, **settings)

    monkeypatch.setattr(Qwen2VLImageProcessor, "preprocess", counted)
    monkeypatch.setattr("adora_vl.packing.images.ImagePrefetch", FinishingPrefetch)
    folder = shutil.copytree(adora_run, tmp_path / "adora")
    shutil.rmtree(folder / f"checkpoint-{TINY_RUN_STEPS}")
    monkeypatch.setattr("adora_vl.packing.images.processes_images_ahead", lambda device: True)
    train_tiny_run(folder)
    assert logged_steps(folder) == logged_steps(adora_run)
    main = threading.current_thread().name
    assert images_by_thread[main] == 4, "the problems of step 3, the first after the checkpoint"
    assert images_by_thread["prefetch"] >= 4, "those of step 4, and what would have come after it"


def test_rows_are_drawn_by_data_seed_where_it_is_set():
    """The order of rows depends on `data_seed`, or on `seed` without it, as in Transformers."""

    def order(**seeds: Any) -> list[int]:
        """Return the order of 64 rows in a training with these seeds."""
        trainer = AdoraGRPOTrainer.__new__(AdoraGRPOTrainer)
        trainer.args = AdoraGRPOConfig(
            use_cpu=True, bf16=False, output_dir="nowhere", max_steps=10, **seeds
        )
        trainer.num_generations = trainer.args.num_generations
        trainer.num_iterations = trainer.args.num_iterations
        trainer.shuffle_dataset = True
        return list(trainer._get_train_sampler(range(64)))

    assert order(seed=1, data_seed=2) == order(seed=2) == order(seed=3, data_seed=2)
    assert order(seed=1) != order(seed=2)
    assert order(seed=1, data_seed=0) == order(seed=0)
