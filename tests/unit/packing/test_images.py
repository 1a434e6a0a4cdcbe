"""Images are read, decoded and processed once, and give what the processor gives, to the bit.

A cache has processed images by their pixels, and a bank has the patches of a generation's images. A
batch refers to patches by number.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from PIL import Image
from transformers import processing_utils

from adora_vl.builtin import TINY_FAMILIES
from adora_vl.builtin.processor import processor_around
from adora_vl.data import images as images_module
from adora_vl.data import loading, shared_images
from adora_vl.data.dataloader import DistinctRows
from adora_vl.data.prompts import conversation
from adora_vl.data.shared_images import as_image_with_digest
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.packing.image_store import (
    ImageBank,
    ImageBanks,
    ImageCache,
    PatchNormalizer,
    ProcessedImage,
    effective_settings,
    one_frame,
)
from adora_vl.packing.images import may_have_images
from adora_vl.packing.prompts import (
    append_completions,
    distinct_rows,
    read_prompts,
    returning_patch_numbers,
    select_prompts,
)
from adora_vl.record import trackers
from adora_vl.utils import compat
from tests.support.pictures import noise_picture
from tests.support.tiny_run import train_tiny_run


@pytest.fixture(scope="module")
def processor():
    """Return the processor of the tiny model."""
    return load_processor(str(PRETRAINED_FOLDER))


def test_the_cached_output_is_the_processors(processor, subtests):
    """A cache of processed images gives back what the processor gives, whatever its arguments."""
    cases: list[dict[str, Any]] = [
        {},
        {"min_pixels": 28 * 28, "max_pixels": 84 * 84},
        {"do_rescale": False, "do_normalize": False},  # what vLLM asks for
        {"do_normalize": False},
    ]
    for arguments in cases:
        with subtests.test(f"{arguments!r:.80}"):
            images = [
                noise_picture(1),
                noise_picture(2, (120, 90)),
                noise_picture(3, mode="L"),
                noise_picture(1),
            ]
            ours = ImageCache(2**20)
            expected = processor.image_processor(images=images, return_tensors="pt", **arguments)
            for _ in range(2):
                cached = ours.make_preprocess(processor.image_processor)
                with compat.IMAGE_PROCESSING.replaced_by(cached, on=processor.image_processor):
                    actual = processor.image_processor(
                        images=images, return_tensors="pt", **arguments
                    )
                assert torch.equal(actual["image_grid_thw"], expected["image_grid_thw"])
                assert actual["pixel_values"].dtype == expected["pixel_values"].dtype
                assert torch.equal(actual["pixel_values"], expected["pixel_values"])
            assert ours.processed_count == 3, (
                "one of the four was there twice, and the second round asked for nothing new"
            )
            assert "preprocess" not in vars(processor.image_processor)


def test_other_limits_are_another_entry_and_the_oldest_images_go_first(processor):
    """A cache of 20,000 bytes has room for a few of six images; `processed` counts cache misses."""
    cache = ImageCache(20_000)
    cached = cache.make_preprocess(processor.image_processor)
    for seed in range(6):
        cached([noise_picture(seed)])
        # An image that is alone in the cache stays, even if it is larger than the limit.
        assert cache.cached_bytes <= 20_000 or seed == 0
    assert cache.processed_count == 6
    cached([noise_picture(5)])
    assert cache.processed_count == 6, "the newest image is still there"
    cached([noise_picture(0)])
    assert cache.processed_count == 7, "the oldest one went"
    cached([noise_picture(5)], min_pixels=56 * 56, max_pixels=56 * 56)
    assert cache.processed_count == 8, "at another size it is another entry"


def test_an_image_that_is_used_again_and_again_outlives_those_that_came_after_it(processor):
    """An image that is used again stays in the cache, in place of newer ones that are not.

    Image 0 comes before each of eight others here, and the cache has no room for all nine.
    """
    cache = ImageCache(30_000)
    cached = cache.make_preprocess(processor.image_processor)
    for seed in range(1, 9):
        cached([noise_picture(0)])
        cached([noise_picture(seed)])
    assert cache.processed_count == 9
    assert cache.cached_bytes <= 30_000
    cached([noise_picture(1)])
    assert cache.processed_count == 10, "the others went"


def test_pictures_that_differ_in_their_palette_alone_are_two(processor):
    """Images with equal pixels and different palettes are processed and cached as two.

    Their pixels are equal numbers, which stand for other colours.
    """
    drawing = noise_picture(1).quantize(4)
    recoloured = drawing.copy()
    recoloured.putpalette([255 - value for value in drawing.getpalette()])
    cache = ImageCache(2**20)
    settings = effective_settings(processor.image_processor, {})
    drawing_entry = cache.get(processor.image_processor, drawing, settings)
    recoloured_entry = cache.get(processor.image_processor, recoloured, settings)
    assert cache.processed_count == 2
    assert not torch.equal(drawing_entry.frames_RF, recoloured_entry.frames_RF)


def test_no_two_banks_share_a_number_and_the_evaluation_does_not_take_the_trainings_place():
    """Patches are numbered through all banks: a has 0 to 3, b has 4 to 7, and c has 8 to 11.

    A new bank of the training replaces the old one, whose patches are gone then. One of an
    evaluation does not.
    """

    def image(key: str) -> ProcessedImage:
        """Return an image of four patches."""
        return ProcessedImage(key, torch.zeros(4, 3, dtype=torch.uint8), torch.tensor([1, 2, 2]))

    banks = ImageBanks()
    cpu = torch.device("cpu")
    train = banks.new("train")
    first = train.patch_numbers(image("a"), cpu)
    assert first.tolist() == [[0], [1], [2], [3]]
    assert train.patch_numbers(image("a"), cpu).tolist() == first.tolist()
    assert len(train) == 1
    evaluation = banks.new("eval")
    assert evaluation.patch_numbers(image("b"), cpu)[0].item() == 4
    assert banks.of(2) is train
    assert banks.of(5) is evaluation
    again = banks.new("train")
    assert again.patch_numbers(image("c"), cpu)[0].item() == 8
    with pytest.raises(AssertionError, match="no bank"):
        banks.of(2)


def test_distinct_rows_keep_their_order():
    """The result is the first row of each value, and for each row the number of its value."""
    assert distinct_rows(["b", "a", "b", "c", "a"]) == ([0, 1, 3], [0, 1, 0, 2, 1])


def test_rows_with_any_number_of_images_are_as_each_row_alone(processor, subtests):
    """Prompts with 0, 1 or 3 images equal those of the processor, row by row, in every family.

    Each distinct image is processed once: its pixels are in a bank, and rows refer to the numbers
    of its patches there, which start at 100 here.
    """
    shared = noise_picture(1)
    images = [None, [shared], [noise_picture(2), shared, noise_picture(3, (120, 90))], [], [shared]]
    for family in TINY_FAMILIES:
        with subtests.test(family):
            family_processor = processor_around(processor.tokenizer, family)
            rows = [{"prompt": conversation("a"), "images": row} for row in images]
            cache = ImageCache(2**20)
            settings = effective_settings(family_processor.image_processor, {})
            bank = ImageBank(
                first_patch=100,
                normalize=PatchNormalizer(family_processor.image_processor, settings),
            )
            ours = read_prompts(
                rows,
                family_processor,
                {},
                returning_patch_numbers(
                    family_processor.image_processor, cache, bank, torch.device("cpu")
                ),
            )
            plain = read_prompts(rows, family_processor, {})
            assert cache.processed_count == len(bank) == 3
            assert ours.ids == plain.ids
            patches, _ = bank.pixels(bank.image_ids)
            assert torch.equal(
                patches[ours.fields["pixel_values"][:, 0] - 100], plain.fields["pixel_values"]
            )
            assert ours.images == [row or None for row in images]
            assert ours.num_images == [
                0,
                1,
                3,
                0,
                1,
            ]
            pixels = []
            for row, messages in enumerate(ours.messages):
                text = family_processor.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
                separate = family_processor(images=images[row] or None, text=[text])
                pixels += [separate["pixel_values"]] if images[row] else []
                assert ours.ids[row] == list(separate["input_ids"][0])
                assert ours.fields["mm_token_type_ids"][row] == list(
                    separate["mm_token_type_ids"][0]
                )
            assert torch.equal(plain.fields["pixel_values"], torch.cat(pixels))


def test_chosen_prompts_are_those_of_their_rows_and_go_on_with_their_completions(processor):
    """Some of the prompts are as if their rows had been read alone, in the order of the choice.

    Behind them come the tokens of a completion, among which only those of an image count as one.
    """
    images = [None, [noise_picture(1)], [noise_picture(2), noise_picture(3, (120, 90))]]
    rows = [{"prompt": conversation("a"), "images": row} for row in images]
    prompts = read_prompts(rows, processor, {})
    chosen = select_prompts(prompts, [2, 0])
    alone = read_prompts([rows[2], rows[0]], processor, {})
    assert (chosen.ids, chosen.images) == (alone.ids, alone.images)
    assert chosen.fields.keys() == alone.fields.keys()
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(chosen.fields[name], alone.fields[name])
    assert select_prompts(prompts, [0]).images is None
    assert "pixel_values" not in select_prompts(prompts, [0]).fields

    image_token = processor.image_token_id
    longer = append_completions(chosen, [[5, image_token, 6], []], image_token)
    assert longer.ids == [[*alone.ids[0], 5, image_token, 6], alone.ids[1]]
    types = alone.fields["mm_token_type_ids"]
    assert longer.fields["mm_token_type_ids"] == [[*types[0], 0, 1, 0], types[1]]
    assert chosen.ids == alone.ids, "the prompts stay as they were"


def test_a_generation_renders_tokenizes_and_hashes_each_prompt_once(processor, monkeypatch):
    """A prompt is rendered, tokenized and hashed once for all rollouts of its group.

    Two problems have three rollouts each, so there are two of everything and not six. The engine
    processes their images afterwards, and finds them in the cache.
    """
    counts = dict.fromkeys(["rendered", "tokenized", "hashed"], 0)

    def count_calls(owner: Any, name: str, counter: str, number: Any) -> None:
        """Let a function count its work under `counter`; `number` computes it from arguments."""
        original = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            counts[counter] += number(*args, **kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    pictures = [as_image_with_digest(noise_picture(seed)) for seed in range(2)]
    rows = [
        {"prompt": copy.deepcopy(conversation("find x")), "images": [image]}
        for image in pictures
        for _ in range(3)
    ]
    count_calls(
        processing_utils,
        "render_jinja_template",
        "rendered",
        lambda conversations, **_: len(conversations),
    )
    count_calls(type(processor.tokenizer), "__call__", "tokenized", lambda _, text, **__: len(text))
    count_calls(shared_images, "content_digest", "hashed", lambda _: 1)
    cache = ImageCache(2**20)
    bank = ImageBank(first_patch=0)
    read_prompts(
        rows,
        processor,
        {},
        returning_patch_numbers(processor.image_processor, cache, bank, torch.device("cpu")),
    )
    for image in pictures:
        cache.make_preprocess(processor.image_processor)([image])
    assert counts == dict.fromkeys(counts, 2)
    assert cache.processed_count == 2


def test_the_chat_template_gets_its_arguments(processor):
    """Keys of the row's template arguments, here `own`, are variables of the template."""
    template = {"chat_template": "{{ messages | length }} {{ own }}", "own": "me"}
    (ids,) = read_prompts([{"prompt": conversation("a")}], processor.tokenizer, template).ids
    assert processor.tokenizer.decode(ids) == "2 me"


def test_the_rows_of_a_batch_are_decoded_once_and_their_images_are_decoded():
    """A batch repeats each problem's row for its rollouts; the data set is read once for each.

    The rows of the last batch are kept, since the next micro-batch may ask for the same.
    """
    reads: list[int] = []

    class Rows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Any]:
            reads.append(index)
            return {"id": index, "images": [noise_picture(index)]}

    dataset = DistinctRows(Rows())
    rows = dataset.__getitems__([2, 2, 0, 2])
    assert reads == [2, 0]
    assert [row["id"] for row in rows] == [2, 2, 0, 2]
    assert rows[0]["images"][0] is rows[3]["images"][0]
    again = dataset.__getitems__([2, 2, 0, 2])
    assert reads == [2, 0], "the next micro-batch asks for the same"
    assert again[0]["images"][0] is rows[0]["images"][0], "the next micro-batch asks for the same"
    assert dataset.__getitems__([1, 2])[1]["id"] == 2
    assert reads == [2, 0, 1]
    assert dataset.__getitems__([0])[0]["id"] == 0, "no more than one batch is held"
    assert reads == [2, 0, 1, 0], "no more than one batch is held"
    rows[0]["note"] = "own"
    assert "note" not in rows[1], "what is written into one row is not in its copies"
    assert rows[0]["images"][0].tobytes() == noise_picture(2).tobytes()
    assert isinstance(rows[0]["images"][0].resize((4, 4)), Image.Image)


def test_a_data_set_tells_whether_it_has_images():
    """Without images the vision tower need not run, so the column `images` is looked through."""
    features = {"images": [[b"x"], []], "problem": ["a", "b"]}
    assert may_have_images(Dataset.from_dict(features))
    assert not may_have_images(Dataset.from_dict({"images": [[], []], "problem": ["a", "b"]}))
    assert not may_have_images(Dataset.from_dict({"problem": ["a"]}))
    assert may_have_images([{"prompt": "x"}]), "of rows that are made on the way nothing is known"


PROBLEMS = 8  # of a generation, which is learned from in 8 micro-batches
STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict[str, Any]:
    """Train for two optimizer steps of eight micro-batches each.

    Returns the number of images that were decoded, `decoded`, and `gathered`: every value that
    TRL's table has gathered from all ranks, pickled.
    """
    counts: dict[str, Any] = {"decoded": 0, "gathered": []}
    decode = images_module.decoded_image
    gather = gather_object

    def count_decoded(encoded: bytes, **keywords: Any) -> Any:
        counts["decoded"] += 1
        return decode(encoded, **keywords)

    def record_gathered(values: Any) -> Any:
        counts["gathered"].append(pickle.dumps(values))
        return gather(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "decoded_image", count_decoded)
        patch.setattr(trackers, "gather_object", record_gathered)
        train_tiny_run(
            tmp_path_factory.mktemp("runs") / "run",
            max_steps=STEPS,
            save_strategy="no",
            log_completions="true",
            per_device_train_batch_size=4,
            num_generations=4,
            gradient_accumulation_steps=8,
            max_completion_length=8,
        )
    return counts


@pytest.mark.slow
def test_a_problem_is_decoded_once_however_many_micro_batches_learn_from_it(run):
    """The image of a problem is decoded once for all eight micro-batches of its generation.

    The loader is a batch ahead, so at the end it may have read the first problems of a third
    generation.
    """
    assert STEPS * PROBLEMS <= run["decoded"] <= (STEPS + 1) * PROBLEMS


@pytest.mark.slow
def test_ranks_send_one_another_texts_and_no_pixels(run):
    """No image is among the values that the ranks gather for TRL's table of completions.

    TRL gathers the conversations, and images in them would be pickled.
    """
    assert len(run["gathered"]) >= STEPS * 2, "prompts and completions of each generation"
    assert not any(b"PIL" in sent or b"ImageWithDigest" in sent for sent in run["gathered"])
    assert b"PIL" in pickle.dumps(
        [[{"role": "user", "content": [{"image": Image.new("RGB", (8, 8))}]}]]
    )


def test_what_is_no_conversation_is_gathered_as_it_is():
    """`gather_prompts` leaves images out of conversations, and changes no other column."""
    image = as_image_with_digest(Image.new("RGB", (8, 8)))
    prompt: Any = [
        {
            "role": "user",
            "content": [{"type": "image", "image": image}, {"type": "text", "text": "x"}],
        }
    ]
    separate = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    assert trackers.gather_prompts([prompt]) == [separate]
    assert prompt[0]["content"][0]["image"] is image
    plain: list[list[Any]] = [["a", "b"], [[image], None], [0.5, None], ["column"], [[]], []]
    for values in plain:
        assert trackers.gather_prompts(values) == values


def test_a_bank_holds_bytes_and_gives_a_tower_the_processors_numbers(processor):
    """The bank stores an eighth of the bytes of the processor's numbers, and restores these.

    Numbers that are no processed pixels are stored as they are.
    """
    image_processor = processor.image_processor
    expected = image_processor([noise_picture(1)], return_tensors="pt")["pixel_values"]
    settings = effective_settings(image_processor, {})
    entry = ImageCache(2**20).get(image_processor, noise_picture(1), settings)
    bank = ImageBanks(PatchNormalizer(image_processor, settings)).new("train")
    bank.patch_numbers(entry, torch.device("cpu"))
    _, stored, grid_thw = bank.image(0)

    assert stored.dtype == torch.uint8
    assert 8 * stored.nbytes == expected.nbytes
    assert torch.equal(bank.pixels([0])[0], expected)
    unprocessed_patch_numbers = bank.store("changed", -expected, grid_thw)
    pixels, _ = bank.pixels([0, int(unprocessed_patch_numbers[0])])
    assert torch.equal(pixels, torch.cat([expected, -expected]))


def test_a_film_is_not_taken_for_an_image():
    """A picture of two different frames is refused; one frame of two equal ones is stored.

    The processor repeats an image's frame for the tower.
    """
    settings = {"temporal_patch_size": 2, "patch_size": 2}
    film = torch.arange(8, dtype=torch.uint8)[None]  # one channel, two frames of 2 x 2
    with pytest.raises(AssertionError, match="an image has one frame"):
        one_frame(film, settings)
    still = torch.arange(4, dtype=torch.uint8).repeat(1, 2)
    assert one_frame(still, settings).tolist() == [[0, 1, 2, 3]]
