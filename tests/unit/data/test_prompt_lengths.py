"""Prompts that leave no room for an answer are found before the weights are loaded, and refused or
left out.
"""

from collections.abc import Sequence
from copy import copy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, Features
from transformers import Qwen2Config
from trl.data_utils import prepare_multimodal_messages

from adora_vl.checkpoint.fingerprint import compute_fingerprint, fingerprint_differences
from adora_vl.config.command import parse_command
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.data.context_limit import ContextLimit, context_limit, server_context_length
from adora_vl.data.dataset import schema, write_manifest, write_split
from adora_vl.data.images import PixelLimits
from adora_vl.data.loading import load_rows
from adora_vl.data.overlong_prompts import LengthCheck, PromptLengthFilter
from adora_vl.data.prompt_lengths import (
    PromptLengths,
    measure_prompts,
    pixel_limits_of,
    stored_image_sizes,
)
from adora_vl.data.prompts import SYSTEM_PROMPT
from adora_vl.data.token_counters import tokenizer_counter
from adora_vl.evals.records import Problem
from adora_vl.evaluation import EvaluationPlan, EvaluationTask, drop_overlong_problems
from adora_vl.models.load import PRETRAINED_FOLDER, load_config, load_processor
from adora_vl.planning.plan import make_plan
from adora_vl.prepare import prepare
from adora_vl.record.card import model_card
from adora_vl.record.manifest import describe_run
from adora_vl.train import main
from adora_vl.utils.errors import UserError
from eval.command import parse_command as parse_evaluation
from eval.geometry3k import BENCHMARK
from tests.support.benchmark_data import (
    mathvista_rows,
    mmstar_rows,
    write_geometry3k,
    write_mathvista,
    write_mmstar,
)
from tests.support.commands import parse
from tests.support.pictures import draw_figure, encode_picture
from tests.support.row_order import row_ids_of_epochs
from tests.support.stand_ins import training_config

CPU = ["--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "tiny"]
BATCH = [
    "--per_device_train_batch_size",
    "4",
    "--num_generations",
    "2",
    "--max_completion_length",
    "40",
]
ENGINE = ["--use_vllm", "true", "--vllm_importance_sampling_mode", "token_truncate"]
PICTURE = {"bytes": encode_picture(draw_figure(1, size=140)), "path": None}  # 25 image tokens
SHORT = "Find x."
LONG = "Find x. " * 60


def write_prepared_data(
    folder: Path, problems: Sequence[str], images: Sequence[list[Any]] = (), split: str = "train"
) -> Path:
    """Write a prepared data set of these problems, with one picture each if `images` is empty."""
    empty_meta = dict.fromkeys(schema()["meta"], None)
    images_by_row = images or [[PICTURE] for _ in problems]
    rows = []
    for number, problem in enumerate(problems):
        row = {
            "id": f"{folder.name}/{split}/{number}",
            "images": images_by_row[number],
            "problem": problem,
            "answer": "5",
            "answer_raw": "5",
            "choices": None,
            "split": split,
            "source": "own",
            "meta": empty_meta,
        }
        rows.append(row)
    count = write_split(rows, folder, split)
    description = {"source": "own", "input": "x", "revision": None}
    write_manifest(folder, description, {split: count})
    return folder


@pytest.fixture(scope="module")
def data_with_long_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve problems for training, of which three are long, and three for testing.

    The long ones are rows 7, 9 and 11, the longest row 9; of the test rows it is row 1.
    """
    folder = tmp_path_factory.mktemp("data") / "mine"
    problems = [SHORT] * 7 + [LONG, SHORT, LONG + LONG, SHORT, LONG]
    write_prepared_data(folder, problems)
    write_prepared_data(folder, [SHORT, LONG, SHORT], split="test")
    return folder


@pytest.fixture(scope="module")
def processor() -> Any:
    """Return the processor of the tiny model."""
    return load_processor(str(PRETRAINED_FOLDER))


def prompt_tokens_with_image(processor: Any, problem: str, images: int = 25) -> int:
    """Return the tokens of a prompt with one picture of `images` tokens."""
    counter = tokenizer_counter(processor, SYSTEM_PROMPT)
    (tokens,) = counter([problem], [1])
    text_tokens = tokens - 1  # the counter takes an image for one token
    return text_tokens + images


def command_words(data_with_long_prompts: Path, out: Path, *words: str) -> list[str]:
    """Return the command line of a run with this data set and output folder."""
    return [
        *CPU,
        *BATCH,
        *ENGINE,
        "--dataset_name",
        str(data_with_long_prompts),
        "--output_dir",
        str(out),
        *words,
    ]


LIMIT = ContextLimit(
    tokens=100,
    completion_tokens=40,
    name="vllm_max_model_length: 100",
    raise_hint="set it to",
    model_limit=2048,
)


def length_check(prompt: list[int], image: list[int], limit: ContextLimit = LIMIT) -> LengthCheck:
    """Return the check of rows r0, r1, ... with these tokens of prompts and of their images."""
    ids = [f"r{number}" for number in range(len(prompt))]
    return LengthCheck(limit, PromptLengths(ids, prompt, image))


def test_what_is_refused_and_what_is_cut() -> None:
    """Prompts of 100 tokens or more are refused, and those over 60 are warned of.

    `LIMIT` is a context of 100 tokens with answers of 40.
    """
    check = length_check([50, 60, 61, 99, 100, 130], [4] * 6)
    assert check.too_long_indices == [4, 5]
    assert check.cut_indices == [2, 3]
    with pytest.raises(UserError) as error:
        check.usable_indices("error")
    # 170 is the longest prompt, 130, and an answer of 40
    assert str(error.value) == (
        "vllm_max_model_length: 100 is too short for 2 of 6 prompts: row r4 has 100 tokens, 4 of "
        "them for its images, the longest 130; set it to 170, which holds every prompt with its "
        "answer, or leave such rows out with adora_overlong_prompts: drop"
    )
    assert check.usable_indices("drop") == [0, 1, 2, 3]
    assert check.warnings() == [
        "adora_overlong_prompts: drop leaves out 2 of 6 rows, for whose prompts "
        "vllm_max_model_length: 100 is too short (170 would hold all of them)",
        "vllm_max_model_length: 100 leaves 2 of 6 prompts less than max_completion_length: 40, 1 "
        "at the least, and longer answers are cut off there; 139 would leave room",
    ]


def test_prompts_with_room_for_every_answer_are_kept_without_a_word() -> None:
    check = length_check([50, 60], [4, 4])
    assert check.usable_indices("error") == [0, 1]
    assert not check.warnings()


def test_a_data_set_without_one_prompt_that_fits_is_refused() -> None:
    check = length_check([100, 130], [4, 4])
    message = r"^adora_overlong_prompts: drop leaves nothing to use: vllm_max_model.*170"
    with pytest.raises(UserError, match=message):
        check.usable_indices("drop")


def test_the_remedy_is_one_that_helps() -> None:
    """An error on overlong prompts proposes only changes that would help.

    Smaller images are proposed if the text alone has room, and no length above the model's 2048.
    """
    assert "lower max_pixels, or leave" in length_check([120, 50], [90, 4]).refusal()
    assert "lower max_pixels" not in length_check([120], [20]).refusal()
    beyond = length_check([2020], [0]).refusal()
    assert "set it to" not in beyond
    assert "2060 would hold every prompt with its answer, but the model takes 2048" in beyond
    models_limit = ContextLimit(
        tokens=2048,
        completion_tokens=40,
        name="the model's max_position_embeddings: 2048",
        raise_hint="",
        model_limit=2048,
    )
    refusal = length_check([2050], [0], models_limit).refusal()
    assert refusal.startswith(
        "the model's max_position_embeddings: 2048 is too short for 1 of 1 prompt: row r0"
    )
    assert refusal.endswith(
        "; shorten the rows, or leave such rows out with adora_overlong_prompts: drop"
    )


def test_the_limit_that_counts_is_that_of_the_engine_that_samples() -> None:
    """The limit is vLLM's key, else the length that the model was made for; a server has its own.

    Without vLLM its key does not count.
    """
    model = Qwen2Config(max_position_embeddings=2048)

    def limit_name(served: int | None = None, **keys: Any) -> str:
        """The name of the limit of a run with these keys, and with a server of that length."""
        config = {
            "use_vllm": True,
            "vllm_max_model_length": 256,
            "max_completion_length": 40,
            **keys,
        }
        limit = context_limit(training_config(**config), model, served)
        assert limit is not None
        return limit.name

    assert limit_name() == "vllm_max_model_length: 256"
    assert limit_name(vllm_max_model_length=None) == "the model's max_position_embeddings: 2048"
    config = {"vllm_max_model_length": None, "max_completion_length": 40}
    limit_of_vllm = context_limit(training_config(**config, use_vllm=True), model)
    limit_of_transformers = context_limit(training_config(**config, use_vllm=False), model)
    assert (
        "and longer answers are cut off there"
        in length_check([2040], [0], limit_of_vllm).warnings()[0]
    )
    (note,) = length_check([2040], [0], limit_of_transformers).warnings()
    assert note.endswith(
        "8 at the least, and longer answers reach positions that the model was not made for"
    )
    assert limit_name(use_vllm=False) == "the model's max_position_embeddings: 2048", (
        "vLLM's key is for vLLM"
    )
    assert limit_name(served=512) == "the vLLM server's --max-model-len: 512"
    unlimited = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert context_limit(training_config(**config, use_vllm=True), unlimited) is None


def test_a_server_that_does_not_answer_has_no_limit() -> None:
    assert server_context_length(training_config(vllm_server_base_url="http://127.0.0.1:9")) is None


def test_lengths_are_those_of_the_trainers_own_prompts(tmp_path: Path, processor: Any) -> None:
    """Measured lengths are those of the prompts that TRL makes and the processor tokenizes.

    Rows have no image, one, two at their places, or one of another size.
    """
    problems = [SHORT, SHORT, "Add <image> to <image>, é.", LONG]
    sizes = [[], [140], [60, 300], [200]]
    images = []
    for row_sizes in sizes:
        pictures = [draw_figure(seed=size, size=size) for size in row_sizes]
        images.append([{"bytes": encode_picture(picture), "path": None} for picture in pictures])
    folder = write_prepared_data(tmp_path / "mine", problems, images)
    script = parse([*CPU, "--dataset_name", str(folder), "--output_dir", "nowhere"])[0]
    measurements: list[PromptLengths] = []
    limits = pixel_limits_of(processor, load_config(str(PRETRAINED_FOLDER)), None, None)

    def fitting(rows: Dataset, texts: Sequence[str]) -> Sequence[int]:
        counter = tokenizer_counter(processor, script.adora_system_prompt)
        table = rows.data.table
        ids = table["id"].to_pylist()
        texts_and_sizes = zip(ids, texts, stored_image_sizes(table), strict=True)
        measurements.append(measure_prompts(texts_and_sizes, counter, limits, len(ids)))
        return range(len(rows))

    rows = load_rows(script, [str(folder)], 0, fitting)
    (lengths,) = measurements
    for row, length, image_length in zip(
        rows, lengths.prompt_tokens, lengths.image_tokens, strict=True
    ):
        messages = prepare_multimodal_messages(row["prompt"], images=row["images"])
        inputs = processor.apply_chat_template(
            [messages], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        token_ids = list(inputs["input_ids"][0])
        assert length == len(token_ids)
        assert image_length == token_ids.count(processor.image_token_id)
    assert lengths.ids == [row["id"] for row in rows]
    assert lengths.image_tokens[0] == 0
    assert lengths.image_tokens[1] > 0


def test_a_language_model_is_asked_in_plain_texts(processor: Any) -> None:
    """Prompts of a language model are measured with plain texts as contents, as TRL passes them.

    Its template joins strings, so a list of parts would fail.
    """
    tokenizer = copy(processor.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.content + (end or '.') }}{% endfor %}"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": SHORT},
    ]
    for options in (None, {"end": "<|im_end|> and so on"}):  # TRL's chat_template_kwargs
        inputs = tokenizer.apply_chat_template(messages, tokenize=True, **(options or {}))
        counter = tokenizer_counter(tokenizer, "Be brief.", options)

        tokens = counter([SHORT], [0])

        assert tokens == [len(inputs["input_ids"])]


def test_an_image_that_cannot_be_read_is_left_to_the_step_that_names_it(tmp_path: Path) -> None:
    """An image that cannot be read has no size, and counts for no token.

    The training step that reads it names it.
    """
    broken_image = {"bytes": b"\x89PNG\r\n\x1a\n", "path": None}
    missing = {"bytes": None, "path": "gone.png"}
    folder = write_prepared_data(
        tmp_path / "mine", [SHORT] * 3, [[PICTURE], [broken_image], [missing]]
    )
    (file,) = folder.glob("data/*")
    rows = Dataset.from_parquet(str(file), cache_dir=str(tmp_path))
    assert list(stored_image_sizes(rows.data.table)) == [[(140, 140)], [None], [None]]
    image_features = Features({"images": schema()["images"]})
    rows_of_text = Dataset.from_dict({"images": [[], []]}, image_features)
    assert list(stored_image_sizes(rows_of_text.data.table)) == [[], []]
    # The text has a token, and an unreadable image none.
    lengths = measure_prompts(
        [("a", "x", [None])],
        count_characters,
        PixelLimits(min_pixels=1, max_pixels=100, token_side=1),
        1,
    )
    assert lengths.prompt_tokens == [1]
    assert lengths.image_tokens == [0]


def count_characters(texts: Sequence[str], images: Sequence[int]) -> list[int]:
    """Return the tokens of each text: a character and an image are one token each."""
    pairs = zip(texts, images, strict=True)
    return [len(text) + n_images for text, n_images in pairs]


def test_an_image_that_the_processor_refuses_is_named(
    tmp_path: Path, no_weights: None, capsys: Any
) -> None:
    """A run with an image that the model's processor refuses ends at the start with its row.

    One side is over 200 times the other.
    """
    thin_picture = draw_figure(1, size=900).resize((900, 4))
    thin = {"bytes": encode_picture(thin_picture), "path": None}
    folder = write_prepared_data(tmp_path / "mine", [SHORT] * 3, [[PICTURE], [thin], [PICTURE]])
    for arguments in ((), ("--dry-run",)):
        assert main(command_words(folder, tmp_path / "out", *arguments)) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith(
            "error: dataset: row mine/train/1 has an image of 900 x 4 pixels, which the model's"
        )


def test_the_run_does_not_start(
    data_with_long_prompts: Path, tmp_path: Path, no_weights: None, capsys: Any, processor: Any
) -> None:
    """A run with prompts as long as the limit, or longer, is refused before it loads weights.

    They are three of twelve. The error has the length that would hold every prompt with an answer
    of 40 tokens.
    """
    length = prompt_tokens_with_image(processor, LONG)
    longest = prompt_tokens_with_image(processor, LONG + LONG)
    limit = ("--vllm_max_model_length", str(length))
    assert main(command_words(data_with_long_prompts, tmp_path / "out", *limit)) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: vllm_max_model_length: {length} is too short for 3 of 12 prompts: row "
        f"mine/train/7 has {length} tokens, 25 of them for its images, the longest {longest}; set "
        f"it to {longest + 40}, which holds every prompt with its answer, or leave such rows out "
        "with adora_overlong_prompts: drop"
    )
    assert not (tmp_path / "out").exists()
    assert (
        main([*command_words(data_with_long_prompts, tmp_path / "out", *limit), "--dry-run"]) == 2
    )
    assert capsys.readouterr().err.startswith(
        f"error: vllm_max_model_length: {length} is too short for 3 of 12 prompt"
    )


def test_the_length_that_is_named_holds_all(
    data_with_long_prompts: Path, tmp_path: Path, capsys: Any, processor: Any
) -> None:
    """With the length that the error of a shorter limit names, no row is left out or warned of.

    It is the longest prompt and an answer of 40 tokens.
    """
    needed = str(prompt_tokens_with_image(processor, LONG + LONG) + 40)
    arguments = command_words(
        data_with_long_prompts, tmp_path / "out", "--vllm_max_model_length", needed
    )
    run = prepare(parse_command(arguments), "inspect")
    assert len(run.data.train_dataset) == 12
    assert run.data.left_out_ids == ()
    assert capsys.readouterr().out == ""
    assert "overlong_rows_left_out" not in run.manifest()["data"]
    assert main([*arguments, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert f"{needed} leaves all of 12 prompts room for max_completion_length: 40." in output
    assert "It fits" in output


def test_rows_are_left_out_and_recorded(
    data_with_long_prompts: Path, tmp_path: Path, capsys: Any, processor: Any
) -> None:
    """`drop` leaves overlong rows out of the training and names them in note, manifest and card.

    A dry run plans with the rows that are left.
    """
    length = prompt_tokens_with_image(processor, LONG)
    arguments = command_words(
        data_with_long_prompts,
        tmp_path / "out",
        "--vllm_max_model_length",
        str(length),
        "--adora_overlong_prompts",
        "drop",
    )
    run = prepare(parse_command(arguments), "inspect")
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith(
        "adora_overlong_prompts: drop leaves out 3 of 12 rows, for whose prompts vllm_max_model_len"
    )
    assert run.data.left_out_ids == ("mine/train/7", "mine/train/9", "mine/train/11")
    assert [row["id"] for row in run.data.train_dataset] == [
        f"mine/train/{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 10)
    ]
    assert {row["problem"] for row in run.data.train_dataset} == {SHORT}
    assert run.data.train_dataset[7]["images"][0].size == (140, 140)
    manifest = run.manifest()
    assert manifest["data"]["rows"] == 9
    assert manifest["data"]["overlong_rows_left_out"] == 3
    assert "9 rows without 3 overlong ones" in describe_run(manifest)["data"]
    assert "| overlong_rows_left_out | 3 |" in model_card(manifest, [], 1)
    assert prepare(parse_command(arguments)).fingerprint["rows left out"].startswith("3 (")
    capsys.readouterr()
    plan = make_plan(parse_command(arguments), DryRunOptions())
    assert plan.row_count == 9
    assert plan.lengths.longest_prompt == prompt_tokens_with_image(processor, SHORT)
    assert main([*arguments, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "drop leaves out 3 of 12 rows" in output
    assert "9 rows make" in output
    assert "It fits" in output


def test_a_resume_sees_the_same_rows(data_with_long_prompts: Path) -> None:
    """Rows that are left out are in the fingerprint of a run, which a resumed run has to have."""

    def run_fingerprint(left_out: list[str], policy: str = "drop") -> dict[str, str]:
        """Return the fingerprint of a training that leaves out these rows."""
        script = parse([*CPU, "--output_dir", "nowhere", "--adora_overlong_prompts", policy])[0]
        return compute_fingerprint(
            script,
            data=[data_with_long_prompts],
            model="m",
            revision="r",
            processes=1,
            left_out_ids=left_out,
        )

    assert run_fingerprint([]) == run_fingerprint([], "error"), (
        "where nothing is left out, the key changes no run"
    )
    assert fingerprint_differences(run_fingerprint(["a", "b"]), run_fingerprint(["a", "b"])) == []
    for other_selection in ([], ["a"], ["a", "c"]):
        (difference,) = fingerprint_differences(
            run_fingerprint(["a", "b"]), run_fingerprint(other_selection)
        )
        assert difference.startswith("rows left out: 2 (")


def test_a_mixture_keeps_its_shares_among_the_rows_that_are_left(tmp_path: Path) -> None:
    """A mixture has its shares, 0.6 and 0.4, after overlong rows are left out.

    Half of the rows of each data set are overlong. A run that resumes in its second epoch has the
    same order. A data set of which nothing is left is refused.
    """
    sets = [
        write_prepared_data(tmp_path / "large", [SHORT, LONG] * 20),
        write_prepared_data(tmp_path / "small", [LONG, LONG, SHORT, SHORT]),
    ]
    arguments = [
        "--dataset_name",
        *map(str, sets),
        "--adora_mixture",
        "0.6",
        "0.4",
        "--output_dir",
        "nowhere",
    ]
    script = parse([*CPU, *arguments])[0]

    def short(rows: Dataset, texts: Sequence[str]) -> Sequence[int]:
        return [number for number, text in enumerate(texts) if text == SHORT]

    def order(epochs: range) -> list[str]:
        rows = load_rows(script, [str(folder) for folder in sets], 3, short)
        return row_ids_of_epochs(rows, epochs)

    ids = order(range(2))
    assert ids[len(ids) // 2 :] == order(range(1, 2))
    small_ids = [name for name in ids if name.startswith("small")]
    assert set(small_ids) == {"small/train/2", "small/train/3"}
    large_numbers = [int(name.rsplit("/", 1)[1]) for name in ids if name.startswith("large")]
    assert all(number % 2 == 0 for number in large_numbers), "each second row is a short one"
    small_share = len(small_ids) / len(ids)
    assert small_share == pytest.approx(0.4, abs=0.1)
    message = r"^adora_mixture: small has a share, but adora_overlong_prompts: drop leaves"
    with pytest.raises(UserError, match=message):
        load_rows(script, [str(folder) for folder in sets], 3, lambda rows, texts: range(40))


def test_a_dry_run_keeps_the_rows_that_it_has_not_measured(
    data_with_long_prompts: Path, tmp_path: Path, processor: Any
) -> None:
    """Rows that `--rows` leaves unmeasured count as trained on.

    Of 12 rows 8 are measured, of which one is left out, so 11 remain.
    """
    limit = [
        "--vllm_max_model_length",
        str(prompt_tokens_with_image(processor, LONG)),
        "--adora_overlong_prompts",
        "drop",
    ]
    plan = make_plan(
        parse_command(command_words(data_with_long_prompts, tmp_path / "out", *limit)),
        DryRunOptions(rows=8),
    )
    assert len(plan.lengths.prompt_tokens) == 7
    assert plan.row_count == 11
    assert plan.run.messages.unchecked == ["measured on the first 8 of 12 rows (--rows)"]


def problems_asked(*problems: Problem, error_or_drop: str) -> list[Problem]:
    """Return the problems of an evaluation that are asked, with a limit of 110 tokens.

    `error_or_drop`: what becomes of a problem that is longer, as in `adora_overlong_prompts`.
    """
    limit = 110
    token_limit = ContextLimit(
        tokens=limit,
        completion_tokens=10,
        name=f"vllm_max_model_length: {limit}",
        raise_hint="set it to",
        model_limit=None,
    )
    overlong = PromptLengthFilter(
        token_limit,
        counter=count_characters,
        pixels=PixelLimits(min_pixels=1, max_pixels=100, token_side=1),
        error_or_drop=error_or_drop,
        prints_warnings=True,
    )
    task = EvaluationTask(BENCHMARK, list(problems))
    plan = drop_overlong_problems(EvaluationPlan([task], every=1, at_start=True), overlong)
    return plan.tasks[0].problems


def test_the_problems_of_evaluations_are_measured_too(capsys: Any) -> None:
    """Overlong prompts of an evaluation are refused, or left out with `drop`.

    A problem may know the sizes of its images; if not, they are decoded. Here a character is a
    token, and so is a pixel.
    """

    def images() -> list[Any]:
        raise AssertionError("an image was decoded")

    question = "x" * 20
    small = Problem({"pid": "a"}, question, n_images=1, images=images, sizes=lambda: [(3, 3)])
    large = Problem({"pid": "b"}, question, n_images=1, images=images, sizes=lambda: [(10, 10)])
    message = r"for 1 of 2 prompts of the evaluation geometry3k: row b has 120 tokens, 100"
    with pytest.raises(UserError, match=message):
        problems_asked(small, large, error_or_drop="error")
    assert problems_asked(small, large, error_or_drop="drop") == [small]
    assert "drop leaves out 1 of 2 rows of the evaluation geometry3k" in capsys.readouterr().out
    picture = draw_figure(0, size=30).resize((10, 10))
    decoded = Problem({"pid": "c"}, question, n_images=1, images=lambda: [picture])
    broken_problem = Problem({"pid": "d"}, question, n_images=1, images=lambda: [][0])
    assert problems_asked(decoded, broken_problem, error_or_drop="drop") == [broken_problem], (
        "the evaluation counts one that cannot be read"
    )


def test_a_benchmark_knows_the_sizes_of_its_images(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """A benchmark's problems tell the sizes of their images without decoding a picture.

    They are read from the head of the file.
    """
    data_with_long_prompts = {
        "geometry3k": write_geometry3k(tmp_path / "a", 3),
        "mathvista": write_mathvista(tmp_path / "b", mathvista_rows(3)),
        "mmstar": write_mmstar(tmp_path / "c", mmstar_rows(3)),
    }

    def refuse(*args: Any) -> None:
        raise AssertionError("an image was decoded")

    for name, folder in data_with_long_prompts.items():
        with subtests.test(name), pytest.MonkeyPatch.context() as patched:
            benchmark = import_module(f"eval.{name}").BENCHMARK
            arguments = ["infer", "--model", "m", "--data", str(folder), "--output", "o"]
            problems = benchmark.load(
                parse_evaluation(arguments, benchmark).ask_options.data
            ).problems
            expected = [[image.size for image in problem.images()] for problem in problems]
            assert len(problems) == 3
            assert all(len(sizes) == 1 for sizes in expected)
            patched.setattr("PIL.ImageFile.ImageFile.load", refuse)
            assert [problem.sizes() for problem in problems] == expected


def test_a_run_refuses_an_evaluation_that_would_stop_it(
    data_with_long_prompts, tmp_path, capsys, processor
):
    """An evaluation's overlong prompt is refused at the start, or left out with `drop`.

    If `drop` leaves nothing of the evaluation, that is refused too.
    """
    short = write_prepared_data(tmp_path / "short", [SHORT] * 4)
    limit = str(prompt_tokens_with_image(processor, LONG))
    arguments = [
        *command_words(short, tmp_path / "out", "--vllm_max_model_length", limit),
        "--eval_strategy",
        "steps",
    ]
    arguments += ["--eval_steps", "1", "--adora_eval", f"geometry3k={data_with_long_prompts}"]
    for command in ((), ("--dry-run",)):
        assert main([*arguments, *command]) == 2
        expected = (
            f"vllm_max_model_length: {limit} is too short for 1 of 3 prompts of the evaluation "
            "geometry3k: row "
        )
        assert expected + "mine/test/1 has" in capsys.readouterr().err
    arguments += ["--adora_overlong_prompts", "drop"]
    run = prepare(parse_command(arguments), "inspect")
    assert run.evaluations is not None
    assert [problem.pid for problem in run.evaluations.tasks[0].problems] == [
        "mine/test/0",
        "mine/test/2",
    ]
    assert run.data.left_out_ids == ()
    assert len(run.data.train_dataset) == 4
    assert main([*arguments, "--dry-run"]) == 0
    assert "drop leaves out 1 of 3 rows of the evaluation geometry3k" in capsys.readouterr().out
    write_prepared_data(tmp_path / "all", [LONG], split="test")
    for command in ((), ("--dry-run",)):
        assert main([*arguments, "--adora_eval", f"geometry3k={tmp_path / 'all'}", *command]) == 2
        assert (
            "drop leaves nothing to use: vllm_max_model_length: "
            in capsys.readouterr().err.splitlines()[-1]
        )
