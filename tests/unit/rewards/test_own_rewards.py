"""Reward functions of the user's own: found, checked before a run, called with a deadline, stopped
on all ranks.
"""

import asyncio
import contextlib
import math
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import TrainerState

from adora_vl.data.shared_images import as_image_with_digest
from adora_vl.rewards.choose import (
    RewardSet,
    bind_options,
    choose_rewards,
    parse_reward_entries,
    try_rewards,
)
from adora_vl.rewards.explain import main as explain
from adora_vl.rewards.safe_call import RewardFailure, safe_call
from adora_vl.training.guards import RewardGuard
from adora_vl.utils import own_files
from adora_vl.utils.errors import RunError, UserError
from tests.support.step_context import step_context

REPOSITORY_ROOT = Path(__file__).parents[3]
REWARD_TEMPLATE_FILE = REPOSITORY_ROOT / "docs" / "my_rewards.py"
DATA_ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "?"}], "id": f"row/{n}", "answer": str(n)}
    for n in range(3)
]


@pytest.fixture
def load_rewards(tmp_path):
    """Returns a function that writes a file with `body` and loads the entries of a config.

    `FILE` in an entry stands for the path of that file. `options` are those of each entry, by the
    name of its function: `{"size": {"unit": 2}}`.
    """
    numbers = iter(range(1000))  # so that every file of a test is another module

    def load(body: str, *entries: str, options: Any = None) -> RewardSet:
        """Write a file of rewards, and choose the entries from it.

        FILE in an entry stands for the file. `options`: of a function, by its name.
        """
        file = tmp_path / f"own_{next(numbers)}.py"
        file.write_text(textwrap.dedent(body))
        options_by_name = dict(options or {})
        config_entries: list[Any] = []
        for entry in entries:
            path_and_name = entry.replace("FILE", str(file))
            name = path_and_name.rpartition(":")[2]
            if name in options_by_name:
                config_entries.append({path_and_name: options_by_name[name]})
            else:
                config_entries.append(path_and_name)
        return choose_rewards(config_entries)

    return load


def call_as_trl(function: Any, texts: list[str], **columns: Any) -> list[float | None]:
    """Returns the rewards of `texts`, from a call with the arguments that TRL passes."""
    rewards = function(
        prompts=["?"] * len(texts),
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=[[1]] * len(texts),
        **columns,
    )
    return asyncio.run(rewards) if asyncio.iscoroutine(rewards) else rewards


# ----------------------------------------------------------------------------------- what is chosen


def test_presets_and_own_functions_stand_in_the_order_that_was_asked_for(load_rewards):
    """Presets and a user's function are chosen in the order of the config's entries.

    `format` and `accuracy` give 0.0 to a completion without a box; its 4 characters are 2.0.
    """
    body = (
        "def size(completions, *, unit, **kwargs):\n    return [len(c[-1]['content']) / unit for "
        "c in completions]"
    )
    chosen = load_rewards(body, "format", "FILE:size", "accuracy", options={"size": {"unit": 2}})

    rewards = [call_as_trl(function, ["5555"], answer=["5"]) for function in chosen.functions]

    assert rewards == [[0.0], [2.0], [0.0]]
    assert [entry for entry, _ in chosen.user_functions] == [chosen.entries[1]]


def test_the_template_does_what_it_says():
    """The rewards of `docs/my_rewards.py`, which users copy, give what their docstrings say."""
    chosen = choose_rewards(
        [
            {f"{REWARD_TEMPLATE_FILE}:brevity": {"target": 4}},
            f"{REWARD_TEMPLATE_FILE}:whole_number",
            f"{REWARD_TEMPLATE_FILE}:shown_work",
        ]
    )
    chosen.check_columns(["answer", "id", "problem"])
    try_rewards(chosen, DATA_ROWS, 5.0, None)
    brevity, whole_number, shown_work = chosen.functions

    # 1 up to 4 characters, then 4 / length; an empty completion earns nothing
    assert call_as_trl(brevity, ["1234", "12345678", ""]) == [1.0, 0.5, 0.0]
    # None where the answer "x" is no number, so that the row is not scored
    boxes = [r"\boxed{5}", r"\boxed{x}", "5"]
    assert call_as_trl(whole_number, boxes, answer=["5", "7", "x"]) == [1.0, 0.0, None]
    assert call_as_trl(shown_work, ["x = 5", "5"]) == [1.0, 0.0]


REWARD_FILE_BODY = """
    import math
    LIMIT = 3
    class Judge: pass
    def brevity(completions, target=4, **kwargs): return [target for _ in completions]
    def picky(completions, *, difficulty, **kwargs): return difficulty
    def closed(completions): return [1.0]
    def _hidden(completions, **kwargs): return []
"""


def test_a_reward_that_does_not_exist_is_one_line(load_rewards, subtests):
    """An entry without its function, or with an unknown option, is refused in one line.

    Each case: the entries of the config, their options, and what the error says. `FILE` is a file
    with the text of `REWARD_FILE_BODY`.
    """
    cases = [
        (["FILE"], None, "names no function; write FILE.py:FUNCTION"),
        (["FILE:"], None, "names no function"),
        (
            ["FILE:brevty"],
            None,
            r"no function 'brevty' there; it has brevity, picky, closed; did you mean 'brevity'",
        ),
        (["FILE:LIMIT"], None, r"LIMIT is no function \(it is of type int\)"),
        (["FILE:Judge"], None, "Judge is no function"),
        (["my.py.txt:brevity"], None, "is neither a preset nor FILE.py:FUNCTION"),
        (["boxed_acuracy"], None, "did you mean 'boxed_accuracy'"),
        (
            ["accuracy"],
            {"accuracy": {"round": True}},
            "adora_reward.accuracy: unknown option 'round', it has rounding",
        ),
        (
            ["accuracy"],
            {"accuracy": {"rounding": 2}},
            "adora_reward.accuracy.rounding: 2 is not true or false",
        ),
        (["knights"], {"knights": {"rounding": True}}, "unknown option 'rounding', it has none"),
        (
            ["FILE:brevity"],
            {"brevity": 3},
            "adora_reward.brevity: 3 is not a mapping of its options",
        ),
        (
            ["FILE:brevity"],
            {"brevity": {"completions": 3}},
            "'completions' is given by the trainer",
        ),
        (
            ["FILE:brevity"],
            {"brevity": {"targt": 3}},  # which **kwargs would take, and nobody would read
            "adora_reward.brevity: unknown option 'targt', it has target; did you mean 'target'",
        ),
        (
            ["FILE:closed"],
            {"closed": {"target": 3}},
            "adora_reward.closed: unknown option 'target', it has none",
        ),
    ]
    for entries, options, message in cases:
        with subtests.test(f"{entries!r:.80} {options!r:.80} {message!r:.80}"):
            with pytest.raises(UserError, match=message) as error:
                load_rewards(REWARD_FILE_BODY, *entries, options=options)
            assert "\n" not in str(error.value)


def lengthy(completions, *, answer, min_words=3, **kwargs):
    """A reward with an option, and a column of the data; further options are in `kwargs`."""
    return [kwargs.get("max_words", 0) + min_words for _ in completions]


def test_an_option_that_resembles_an_argument_is_meant_for_the_others():
    """An option that is no argument goes to `**kwargs`, unless it is a misspelled argument."""
    for options, expected in (
        ({"max_words": 9}, 9 + 3),  # it resembles `min_words`, but not enough to be a misspelling
        ({"min_words": 1, "min_word": 9}, 1),  # the argument that it resembles is set
        ({"answers": "x"}, 3),  # `answer` is a column
    ):
        assert bind_options("f.py:lengthy", lengthy, options)(["a"], answer=["5"]) == [expected]
    with pytest.raises(UserError, match="'min_wrods'.*did you mean 'min_words'"):
        bind_options("f.py:lengthy", lengthy, {"min_wrods": 9})


def test_an_option_without_a_value_has_its_default():
    """An option whose value is None is the same as one that is left out.

    YAML reads null where nothing follows the name of an option.
    """
    judge = {"base_url": "http://localhost:8000/v1", "model": "m"}
    (plain,) = parse_reward_entries([{"judge": judge}])
    (without_value,) = parse_reward_entries([{"judge": {**judge, "timeout": None, "budget": None}}])
    assert without_value == plain


def test_a_file_that_cannot_be_loaded_is_one_line_with_its_line(load_rewards, subtests):
    """A reward file that cannot be loaded is refused with the line and the class of its error."""
    cases = [
        (
            "import nowhere_to_be_found",
            "line 1: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        ),
        ("x = 1\ndef f(:", "line 2: SyntaxError"),
        ("x = 1\n\n1 / 0", "line 3: ZeroDivisionError"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit"),
    ]
    for body, message in cases:
        with subtests.test(f"{body!r:.80}"), pytest.raises(UserError, match=message):
            load_rewards(body, "FILE:f")


def test_a_function_that_the_columns_do_not_fit_is_found_before_the_run(load_rewards, subtests):
    """A column that a function needs must exist, and an option may not have a column's name.

    The functions are those of `REWARD_FILE_BODY`.
    """
    for name, options, message in [
        (
            "picky",
            None,
            r"needs 'difficulty', which is no column of the data set \(it has answer, id\)",
        ),
        ("brevity", {"brevity": {"answer": 3}}, "'answer' is a column of the data"),
    ]:
        chosen = load_rewards(REWARD_FILE_BODY, f"FILE:{name}", options=options)
        with subtests.test(name), pytest.raises(UserError, match=message):
            chosen.check_columns(["answer", "id"])


def test_what_a_function_needs_may_come_from_its_options(load_rewards):
    """An argument that no column of the data has may be given as an option.

    `picky` in `REWARD_FILE_BODY` needs `difficulty`.
    """
    chosen = load_rewards(REWARD_FILE_BODY, "FILE:picky", options={"picky": {"difficulty": [0.5]}})
    chosen.check_columns(["answer", "id"])
    assert call_as_trl(chosen.functions[0], ["a"]) == [0.5]


def test_a_file_is_looked_for_beside_the_config_first_and_its_hash_changes_with_it(
    tmp_path, monkeypatch
):
    """A reward file is taken from the config's folder if it is there, else from the working one.

    Both folders have a file `r.py`, whose reward is 1 beside the config and 2 in the other.
    """
    config_folder = tmp_path / "configs"
    working_directory = tmp_path / "here"
    for folder, value in ((config_folder, 1), (working_directory, 2)):
        folder.mkdir()
        (folder / "r.py").write_text(
            f"def f(completions, **kwargs): return [{value}] * len(completions)"
        )
    monkeypatch.chdir(working_directory)

    without_config = choose_rewards(["r.py:f"])
    monkeypatch.setattr(own_files, "_config_folders", [config_folder])
    with_config = choose_rewards(["r.py:f"])

    assert call_as_trl(with_config.functions[0], ["a"]) == [1]
    assert call_as_trl(without_config.functions[0], ["a"]) == [2]
    assert with_config.hashes.keys() == {"r.py"}
    assert with_config.hashes != without_config.hashes


def test_a_changed_neighbour_of_a_reward_file_is_another_reward(tmp_path, subtests):
    """The hash of a reward file takes in the user's files that it imports, however far.

    It leaves out files that are not imported, and our own package.
    """
    files = {
        "r.py": "import json, adora_vl.types\nfrom scale_of_r import SCALE\n"
        "def f(completions, **kwargs):\n    from package_of_r.inner import late\n"
        # a package of the user's own, though its name is one of ours
        "    if not completions: import eval.lengths\n"
        "    return [SCALE] * len(completions)",
        "scale_of_r.py": "SCALE = 1",
        "package_of_r/inner/__init__.py": "from .. import beside; from .late import VALUE",
        "package_of_r/inner/late.py": "VALUE = 1",
        "package_of_r/beside.py": "VALUE = 1",
        "eval/lengths.py": "VALUE = 1",
        "adora_vl/types.py": "ours, which a checkout has beside the file",
        "unused.py": "never imported",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def reward_hash() -> str:
        """Load the reward anew, and return the hash of its file and what that imports."""
        return choose_rewards([f"{tmp_path / 'r.py'}:f"]).hashes[str(tmp_path / "r.py")]

    hash_before = reward_hash()
    for name, text in files.items():
        with subtests.test(name):
            edited_text = text.replace("1", "2") if "1" in text else f"{text}\n# edited"
            (tmp_path / name).write_text(edited_text)
            is_unchanged = reward_hash() == hash_before
            assert is_unchanged == (name in ("unused.py", "adora_vl/types.py"))
            (tmp_path / name).write_text(text)


def test_a_file_may_import_its_neighbour_which_hides_no_library(tmp_path):
    """A file `torch.py` beside the reward is not imported in place of the library."""
    (tmp_path / "neighbour_of_a_reward.py").write_text("VALUE = 7")
    (tmp_path / "torch.py").write_text("1 / 0")
    (tmp_path / "r.py").write_text(
        "import torch\nfrom neighbour_of_a_reward import VALUE\n"
        "def f(completions, **k): return [VALUE]"
    )
    assert call_as_trl(choose_rewards([f"{tmp_path / 'r.py'}:f"]).functions[0], ["a"]) == [7]


# ------------------------------------------------------------------------------- what a call may do


def call_safely(
    function: Any, completion_count: int = 3, timeout: float | None = 5.0
) -> tuple[list[float | None], list[RewardFailure]]:
    """Calls a reward under the guard, with the completions "0", "1", ... of the rows row/0, row/1.

    Returns the rewards, and the failures that a run would end with.
    """
    failures: list[RewardFailure] = []
    guarded = safe_call(function, "mine", timeout, failures)
    texts = [str(n) for n in range(completion_count)]
    ids = [f"row/{n}" for n in range(completion_count)]
    rewards = call_as_trl(guarded, texts, id=ids)
    return rewards, failures


def reward_that_returns(value: Any) -> Any:
    """Return a reward function that returns `value`, whatever it is called with."""
    return lambda **kwargs: value


def test_numbers_and_none_are_rewards_in_every_form(subtests):
    """Integers, floats, booleans, None and tensors are rewards, in a list, a tuple or a tensor."""
    for returned in [
        [1, None, 0.5],
        (True, None, 0.5),
        torch.tensor([1, 0.25, 0.5]),
        [torch.tensor(1.0), None, torch.tensor(0.5)],
    ]:
        with subtests.test(f"{returned!r:.80}"):
            rewards, failures = call_safely(reward_that_returns(returned))
            assert failures == []
            assert rewards[0] == 1
            assert rewards[2] == 0.5
            assert rewards[1] in (None, 0.25)  # 0.25 in the whole tensor, which cannot hold None


def test_nonsense_is_a_failure_with_row_and_reason(subtests):
    """A reward that is no list with a finite number or None for each row is a failure.

    Each case: what it returns, and the rows and the reason that the failure names.
    """
    cases = [
        (
            None,
            "3 completions together, of row row/0 and others",
            "it returned None (NoneType), not a list",
        ),
        (
            0.5,
            "3 completions together",
            "it returned 0.5 (float), not a list with one reward per completion",
        ),
        ("abc", "3 completions together", "it returned 'abc' (str), not a list"),
        ([1.0, 2.0], "3 completions together", "it returned 2 rewards for 3 completions"),
        (
            [1.0, math.nan, 2.0],
            "row row/1",
            "it returned nan; return None for a completion that is not scored",
        ),
        ([1.0, 2.0, math.inf], "row row/2", "it returned inf"),
        ([1.0, "2", 3.0], "row row/1", "it returned '2' (str), not a number or None"),
        ([1.0, [2], 3.0], "row row/1", "it returned [2] (list), not a number"),
    ]
    for returned, row, reason in cases:
        with subtests.test(f"{returned!r:.80}"):
            rewards, [failure] = call_safely(reward_that_returns(returned))
            assert len(rewards) == 3
            assert failure.function == "mine"
            assert failure.rows_in_words.startswith(row)
            assert failure.reason.startswith(reason)


HOOKS: dict[str, Callable[..., None]] = {
    "log_extra": lambda *_: None,
    "log_metric": lambda *_: None,
}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("share", 0.5, None),
        ("share", np.float32(0.5), None),
        ("share", torch.tensor(1), None),
        ("share", True, None),
        ("reward", 9.0, "it logged the metric 'reward', which the trainer logs itself; give it"),
        ("loss", 9.0, "it logged the metric 'loss', which the trainer logs itself; give it"),
        ("share", "half", "it logged 'half' (str) as the metric 'share', which is no number"),
        ("share", [0.5], "it logged [0.5] (list) as the metric 'share', which is no number"),
    ],
)
def test_a_metric_of_the_log_is_a_number_and_none_of_the_trainers(name, value, reason):
    """A metric that is no number, or has a name of the trainer's, is a failure; else it is logged.

    `reason` is how the failure begins; None where the metric is logged.
    """
    logged: list[object] = []

    def mine(
        completions: list[str], log_metric: Callable[..., object], **columns: object
    ) -> list[float]:
        log_metric(name, value)
        return [0.0] * len(completions)

    failures: list[Any] = []
    safe = safe_call(mine, "mine", timeout=None, failures=failures)
    safe(completions=["a"], **{**HOOKS, "log_metric": lambda _, number: logged.append(number)})

    if reason is None:
        assert failures == []
        assert logged == [float(value)]
    else:
        assert [failure.reason[: len(reason)] for failure in failures] == [reason]
        assert logged == []


@pytest.mark.parametrize("parts", [[3], [1, 1, 1], [2, 0, 1]])  # values in each call of log_extra
def test_a_column_of_the_log_has_a_value_for_each_completion_however_it_is_logged(parts):
    """A reward may log its column in one call or in several: `parts` has the values in each.

    All of them have one value for each of the three completions.
    """
    logged: list[object] = []

    def mine(
        completions: list[str], log_extra: Callable[..., object], **columns: object
    ) -> list[float]:
        for count in parts:
            log_extra("words", range(count))
        return [0.0] * len(completions)

    failures: list[Any] = []
    safe = safe_call(mine, "mine", timeout=None, failures=failures)
    safe(
        completions=["a", "b", "c"],
        **{**HOOKS, "log_extra": lambda _, values: logged.extend(values)},
    )
    assert not failures
    assert len(logged) == 3


@pytest.mark.parametrize("count", [0, 1, 2, 4, 6])
def test_a_column_with_too_few_or_too_many_values_is_a_failure(count):
    """A column with more or fewer values than the three completions is a failure.

    The values of all later completions, also those of other ranks, would stand in other rows.
    """

    def mine(
        completions: list[str], log_extra: Callable[..., object], **columns: object
    ) -> list[float]:
        log_extra("words", ["x"] * count)
        return [0.0] * len(completions)

    failures: list[Any] = []
    safe = safe_call(mine, "mine", timeout=None, failures=failures)
    safe(completions=["a", "b", "c"], **HOOKS)
    assert [failure.reason for failure in failures] == [
        f"it logged {count} values of 'words' for 3 completions; log one for each, None where "
        "there is none"
    ]


def fails_on_one(completions: Any, **kwargs: Any) -> list[float]:
    """A reward that divides by zero for the completion "1", and gives 1.0 for all others."""
    return [1 / (completion[0]["content"] != "1") for completion in completions]


async def fails_on_one_async(completions: Any, **kwargs: Any) -> list[float]:
    """The same as `fails_on_one`, as a coroutine."""
    return fails_on_one(completions)


def test_an_exception_names_the_row_that_fails_alone_and_the_line(subtests):
    """An exception is a failure that names the row that fails alone, here `row/1`, and the line."""
    for function in [fails_on_one, fails_on_one_async]:
        with subtests.test(f"{function!r:.80}"):
            _, [failure] = call_safely(function)
            assert failure.rows_in_words == "row row/1"
            assert re.fullmatch(
                r"ZeroDivisionError: .* \(test_own_rewards.py, line \d+\)", failure.reason
            )


def test_an_exception_of_the_batch_alone_is_said_so_and_the_search_logs_nothing():
    """A reward that fails on two completions, and on neither alone, is a failure of both.

    To find the bad one it is called with each of them. Only the first call may log.
    """
    logged: list[int] = []

    def fails_on_two(completions: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("x", 1.0)
        assert len(completions) == 1
        return [1.0]

    failures: list[RewardFailure] = []
    arguments = {"completions": ["a", "b"], "log_metric": lambda *_: logged.append(1)}
    safe_call(fails_on_two, "mine", timeout=5.0, failures=failures)(**arguments)

    assert failures[0].rows_in_words == "2 completions together"
    assert logged == [1]


def edits_all_that_it_gets(
    prompts: Any, completions: Any, completion_ids: Any, answer: Any, **columns: Any
) -> Any:
    """A reward that changes every list and object that it is called with."""
    for completion in completions:
        completion[-1]["content"] = completion[-1]["content"].strip()
    prompts[0].clear()
    prompts.clear()
    completion_ids[0].append(7)
    columns["choices"][0].reverse()
    columns["trainer_state"].global_step = 0
    columns["trainer_state"].log_history.clear()
    answer[:] = ["?"] * len(answer)
    return [0.0] * len(completions)


async def edits_later(**arguments: Any) -> Any:
    """The same as `edits_all_that_it_gets`, as a coroutine."""
    return edits_all_that_it_gets(**arguments)


@pytest.mark.parametrize("function", [edits_all_that_it_gets, edits_later])
def test_a_function_that_edits_its_arguments_edits_its_own(function):
    """A function that edits its arguments changes nothing in the lists that it was called with.

    TRL gives every function the same lists, and makes the record from them.
    """
    image = object()
    columns: dict[str, Any] = {
        "prompts": [[{"role": "user", "content": [{"type": "image", "image": image}]}]],
        "completions": [[{"role": "assistant", "content": " 5 "}]],
        "completion_ids": [[1, 2]],
        "answer": ["5"],
        "choices": [["a", "b"]],
        "trainer_state": TrainerState(global_step=3, log_history=[{"loss": 1.0}]),
    }
    # without the prompts: deepcopy would copy `image` too, and it has to stay the same object
    columns_before = deepcopy({**columns, "prompts": None})
    failures: list[RewardFailure] = []

    rewards = safe_call(function, "mine", timeout=5.0, failures=failures)(**columns)
    if asyncio.iscoroutine(rewards):
        rewards = asyncio.run(rewards)

    assert rewards == [0.0]
    assert failures == []
    assert columns["prompts"][0][0]["content"][0]["image"] is image
    assert {**columns, "prompts": None} == columns_before


IMAGE_EDITS: list[Any] = [
    lambda image: ImageDraw.Draw(image).line((0, 0, 7, 7), fill=1),
    lambda image: image.putpixel((7, 0), 1),
    lambda image: image.paste(1, (4, 0, 8, 4)),
    lambda image: image.frombytes(bytes(255 - value for value in image.tobytes())),
    lambda image: image.thumbnail((4, 4)),
]
ONE_BAND_EDITS: list[Any] = [  # a pixel of several bands would need a tuple
    lambda image: image.load().__setitem__((0, 0), 1),
    lambda image: image.putdata([1] * 64),
]


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
def test_a_function_that_draws_on_an_image_draws_on_its_own(mode):
    """A function that draws on an image changes neither the original nor the other row's image.

    The two rollouts of a group share one image object.
    """
    image = as_image_with_digest(Image.new(mode, (8, 8)))
    columns = {"completions": ["a", "b"], "images": [[image], [image]]}
    pixels_before = image.tobytes()
    edits = [*IMAGE_EDITS, *ONE_BAND_EDITS] if len(image.getbands()) == 1 else IMAGE_EDITS
    for edit in edits:
        failures: list[RewardFailure] = []

        def edits_the_first(images: Any, edit: Any = edit, **rest: Any) -> list[float]:
            """Edit the first image; 1.0 if it has changed, and 1.0 if the second one has not."""
            (edited,), (untouched,) = images
            edit(edited)
            return [
                float(edited.tobytes() != pixels_before),
                float(untouched.tobytes() == pixels_before),
            ]

        assert safe_call(edits_the_first, "mine", timeout=5.0, failures=failures)(**columns) == [
            1.0,
            1.0,
        ]
        assert failures == []
        assert image.tobytes() == pixels_before
        assert image.size == (8, 8)


def test_a_function_that_edits_arrays_sets_and_the_log_edits_its_own():
    """Arrays, tensors, sets and the trainer's log are copied; environments are not.

    An environment belongs to its rollout: a reward may ask it, and change it.
    """
    environment = SimpleNamespace(asked=0)
    columns: dict[str, Any] = {
        "completions": ["a"],
        "points": [np.zeros(3)],
        "weights": [torch.zeros(3)],
        "tags": [{"a"}],
        "trainer_state": TrainerState(log_history=[{"loss": 1.0, "more": [1]}]),
        "environments": [environment],
    }

    def edits(
        points: Any, weights: Any, tags: Any, trainer_state: Any, environments: Any, **_: Any
    ):
        """Change each kind of value in place, as a careless reward might."""
        points[0][:] = 1
        weights[0].fill_(1)
        tags[0].add("b")
        trainer_state.log_history[0]["loss"] = 2.0
        trainer_state.log_history[0]["more"].append(2)
        environments[0].asked += 1
        return [0.0]

    failures: list[RewardFailure] = []
    assert safe_call(edits, "mine", timeout=5.0, failures=failures)(**columns) == [0.0]
    assert failures == []
    assert not columns["points"][0].any()
    assert not columns["weights"][0].any()
    assert columns["tags"] == [{"a"}]
    assert environment.asked == 1
    assert columns["trainer_state"].log_history == [{"loss": 1.0, "more": [1]}]


async def exits_later(**kwargs: Any) -> Any:
    """A coroutine that ends the process, if nobody stops it."""
    sys.exit(0)


class RewardPanic(BaseException):
    """An error as compiled code raises it, of which some is no `Exception`."""


class SpeechlessError(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no words")


def reward_that_raises(error: BaseException) -> Any:
    """Return a reward function that raises `error`."""

    def function(**kwargs: Any) -> Any:
        raise error

    return function


async def awaits_a_task_that_was_cancelled(**kwargs: Any) -> Any:
    """A reward in which asyncio raises `CancelledError`."""
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


def test_whatever_a_function_raises_is_a_failure_of_one_short_line(subtests):
    """An error of any class is a failure with a short reason; only `KeyboardInterrupt` is raised.

    An error that came out of a call would leave the other ranks waiting, and the run without a
    checkpoint.
    """
    for function, reason in [
        (
            reward_that_raises(RewardPanic("index out of bounds")),
            "RewardPanic: index out of bounds (test_own",
        ),
        (reward_that_raises(asyncio.CancelledError("gone")), "CancelledError: gone (test_own"),
        (awaits_a_task_that_was_cancelled, "CancelledError (test_own"),
        (reward_that_raises(SpeechlessError()), "SpeechlessError (test_own"),
        (reward_that_raises(ValueError(10**6 * "x")), "ValueError: xxx"),
        (reward_that_raises(SystemExit(10**6 * "x")), "it called sys.exit('xxx"),
        (reward_that_raises(SystemExit(0)), "it called sys.exit(0) (test_own_rewards.py, line "),
        (exits_later, "it called sys.exit(0) (test_own"),
    ]:
        with subtests.test(reason):
            rewards, [failure] = call_safely(function)
            assert len(rewards) == 3
            assert failure.rows_in_words == "row row/0"
            assert failure.reason.startswith(reason)
            assert len(failure.reason) < 300
    with pytest.raises(KeyboardInterrupt):  # the user's own, who waits for it
        call_safely(reward_that_raises(KeyboardInterrupt()))


def test_a_function_that_goes_elsewhere_leaves_the_run_where_it_was(
    load_rewards, tmp_path, monkeypatch
):
    """A file or a function that changes the working directory has it changed back after the call.

    Else a relative `output_dir` would become another folder, with checkpoints and record.
    """
    body = f"""
        import os
        os.chdir({str(tmp_path / "away")!r})
        def goes(completions, **kwargs):
            os.chdir("/")
            return [1.0] * len(completions)
        async def goes_later(completions, **kwargs):
            return goes(completions)
        def goes_and_fails(completions, **kwargs):
            os.chdir("/")
            raise ValueError
    """
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path)

    chosen = load_rewards(body, "FILE:goes", "FILE:goes_later", "FILE:goes_and_fails")

    assert Path.cwd() == tmp_path  # though the file changes it when it is imported
    for function in chosen.functions:
        call_safely(function)
        assert Path.cwd() == tmp_path


def test_a_process_that_a_function_forks_ends_with_the_call(tmp_path):
    """A child that returns from the reward ends with exit code 1 and a line on standard error.

    It would otherwise train as a second copy of this rank. One that exits by itself keeps its code.
    A reward file that forks when it is imported is treated alike.
    """
    code = """
import os, sys
from adora_vl.rewards.safe_call import safe_call
def forks(completions, **kwargs):
    os.fork()
    return [1.0]
rewards = safe_call(forks, "forks", 5.0, failures := [])(completions=["a"])
child, status = os.wait()
print(rewards, failures, os.waitstatus_to_exitcode(status))
def forks_well(completions, **kwargs):
    if os.fork() == 0:
        sys.exit(3)
    return [os.waitstatus_to_exitcode(os.wait()[1])]
print(safe_call(forks_well, "forks_well", 5.0, failures)(completions=["a"]), failures, flush=True)
from adora_vl.rewards.choose import choose_rewards
choose_rewards([sys.argv[1] + ":own"])
print("loaded", os.waitstatus_to_exitcode(os.wait()[1]))
"""
    file = tmp_path / "own.py"
    file.write_text("import os\nos.fork()\ndef own(completions, **kwargs): return [1.0]")

    finished = run_python(code, str(file))

    assert finished.stdout.splitlines() == ["[1.0] [] 1", "[3.0] []", "loaded 1"]
    message = "it forked a process that did not end in it (os._exit); that process was ended"
    assert finished.stderr.splitlines() == [f"reward forks: {message}", f"own.py:own: {message}"]


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a Python of its own, and returns what it printed and its exit code."""
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=REPOSITORY_ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_function_that_hangs_is_stopped_even_where_it_catches_everything():
    """A reward that sleeps, searches or waits for too long is a failure after the 0.2 s it has.

    The one that sleeps catches every `Exception`, and goes on.
    """

    def sleeps(**kwargs: Any) -> list[float]:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(60)

    def searches(**kwargs: Any) -> list[float]:
        return [len(re.findall(r"(a+)+$", "a" * 64 + "b"))]  # takes 2^64 steps

    async def waits(**kwargs: Any) -> list[float]:
        await asyncio.sleep(60)
        return []

    for function in (sleeps, searches, waits):
        start = time.monotonic()
        _, [failure] = call_safely(function, timeout=0.2)
        assert time.monotonic() - start < 10  # far less than the 60 s of its sleep
        assert failure.reason.startswith("it did not return within 0.2 s (adora_reward_timeout)")


def test_the_search_for_the_completion_that_fails_has_a_time_limit_too():
    """A function that fails on all completions together, and hangs on one, is not waited for.

    After a failure it is called with each completion alone, to name the one on which it fails.
    """

    def hangs_on_one(completions: list[str], **kwargs: object) -> list[float]:
        if len(completions) == 1:
            time.sleep(60)
        raise ValueError("too many")

    async def hangs_on_one_async(completions: list[str], **kwargs: object) -> list[float]:
        if len(completions) == 1:
            await asyncio.sleep(60)
        raise ValueError("too many")

    for function in (hangs_on_one, hangs_on_one_async):
        start = time.monotonic()
        _, [failure] = call_safely(function, timeout=0.2)
        assert time.monotonic() - start < 10  # far less than the 60 s of its sleep
        assert "too many" in failure.reason
        assert "together" in failure.rows_in_words  # none is known to fail alone


def test_a_search_that_the_caller_cancels_ends():
    """Where another coroutine of the step fails, asyncio cancels this call: it has not failed."""
    failures: list[RewardFailure] = []

    async def hangs_on_one(completions: list[str], **kwargs: object) -> list[float]:
        if len(completions) == 1:
            await asyncio.sleep(60)
        raise ValueError("too many")

    async def cancel_in_the_search() -> None:
        call = safe_call(hangs_on_one, "hangs", timeout=30, failures=failures)
        task = asyncio.create_task(call(completions=["a", "b"]))
        await asyncio.sleep(0.2)  # the first call has failed by then, and the second one hangs
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel_in_the_search())
    assert failures == []


def test_a_timer_that_was_running_goes_on_and_no_alarm_is_left():
    """A call leaves the alarm timer as it was: running on, or off.

    The deadline of a call uses the same timer of the process as, for example, pytest-timeout.
    """
    timer_before = signal.getitimer(signal.ITIMER_REAL)
    call_safely(lambda **kwargs: [1, 1, 1])
    timer_after = signal.getitimer(signal.ITIMER_REAL)
    assert bool(timer_before[0]) == bool(timer_after[0])
    assert timer_after[0] <= timer_before[0]


def test_what_python_cannot_interrupt_ends_the_process_with_a_traceback():
    """An async function that blocks its loop ends the process, with a traceback on standard error.

    Neither the loop's own deadline nor a signal reaches it. The process ends `GRACE_S` seconds
    after the deadline of 0.2 s.
    """
    code = """
import time
from adora_vl.rewards import safe_call
from adora_vl.utils import call_guards
import asyncio
call_guards.GRACE_S = 0.5
async def blocks(**kwargs):
    time.sleep(60)
asyncio.run(safe_call.safe_call(blocks, "blocks", 0.2, [])(completions=["a"]))
"""
    finished = run_python(code)
    assert finished.returncode == 1
    assert "in blocks" in finished.stderr


# --------------------------------------------------------------------------------- how the run ends


def checkpoint_saver(folder: Path, saved: list[Path]) -> Callable[[], Path]:
    """Returns a stand-in for the trainer's saving of a checkpoint.

    Each call appends `folder` to `saved`, and returns it as the place of the checkpoint.
    """

    def save() -> Path:
        saved.append(folder)
        return folder

    return save


def test_the_run_ends_in_one_line_with_a_checkpoint_and_only_where_something_failed(tmp_path):
    """A step with a failed reward ends at `check`: a checkpoint is saved and one line is raised.

    `check` is called at the end of each step. The step before, in which nothing failed, goes on.
    """
    saved: list[Path] = []
    guard = RewardGuard(step_context(save_now=checkpoint_saver(tmp_path, saved)))
    sound, failing = guard.wrap_functions(
        [lambda completions, **k: [1.0] * len(completions), fails_on_one], ["a", "mine"]
    )

    call_as_trl(sound, ["0", "1"])
    guard.check(2)
    assert saved == []

    call_as_trl(failing, ["0", "1"])
    with pytest.raises(RunError) as error:
        guard.check(2)  # counted from 0, and printed as step 3
    text = str(error.value)
    assert text.startswith("step 3: reward mine: completion 2 of 2: ZeroDivisionError: ")
    assert "\n" not in text
    assert text.endswith(f"go on with --resume_from_checkpoint {tmp_path}")
    assert saved == [tmp_path]


def test_reward_models_and_the_time_of_presets_are_left_alone():
    """A guard calls a reward model directly, and a preset without the deadline."""
    guard = RewardGuard(step_context(save_now=Path, adora_reward_timeout=0.2))
    model = torch.nn.Linear(1, 1)
    preset = choose_rewards(["accuracy"]).functions[0]

    guarded_model, guarded_preset = guard.wrap_functions(
        [model, preset], ["model", "accuracy_reward"]
    )

    assert guarded_model is model
    assert call_as_trl(guarded_preset, [r"\boxed{5}"], answer=["5"]) == [1.0]
    call_as_trl(guarded_preset, ["5"])
    # a mistake of the data stays a `UserError`, and does not become a `RunError`
    with pytest.raises(UserError, match="step 1: .*no column 'answer'"):
        guard.check(0)


def test_a_rank_whose_functions_are_sound_stops_and_saves_with_the_one_that_failed(
    monkeypatch, tmp_path
):
    """A rank without a failure of its own saves and raises for one that another rank reports.

    Every rank gathers the failures of all, whether or not it has failed itself. A rank that skipped
    this collective call would wait for the others for ever.
    """
    failures_elsewhere: list[RewardFailure] = []
    monkeypatch.setattr(
        "adora_vl.training.guards.gather_object", lambda local: [*local, *failures_elsewhere]
    )
    saved: list[Path] = []
    guard = RewardGuard(step_context(save_now=checkpoint_saver(tmp_path, saved)))

    guard.check(0)  # nobody has failed

    failures_elsewhere.append(RewardFailure("mine", "row row/7", "ZeroDivisionError: why"))
    with pytest.raises(
        RunError,
        match="step 1: reward mine: row row/7: ZeroDivisionError: why. Nothing of this step",
    ):
        guard.check(0)
    assert saved == [tmp_path]


# -------------------------------------------------------------------------------------- the command


def test_explain_tries_a_reward_without_a_model(capsys):
    """The command prints the reward of one response, from a file of rewards or from a preset."""
    brevity = f"{{{REWARD_TEMPLATE_FILE}:brevity: {{target: 3}}}}"
    arguments = ["--reward", brevity, "accuracy", "--gold", "5", "--response", r"\boxed{5}"]
    assert explain(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    # the target of 3 characters by the 9 of the response
    assert f"reward     {REWARD_TEMPLATE_FILE}:brevity 0.333333" in lines
    assert "reward     accuracy 1" in lines

    whole_number = f"{REWARD_TEMPLATE_FILE}:whole_number"
    arguments = ["--reward", whole_number, "--response", "5", "--column", "answer=x"]
    assert explain(arguments) == 0
    assert capsys.readouterr().out == f"reward     {whole_number} None (not scored)\n"


def test_explain_says_in_one_line_what_is_wrong(capsys, subtests):
    """A command that cannot try a reward prints one line on standard error, and exits with 2.

    Each case: the words of the command, and a part of the line.
    """
    whole_number = f"{REWARD_TEMPLATE_FILE}:whole_number"
    brevity = f"{REWARD_TEMPLATE_FILE}:brevity"
    cases = [
        ([], "give --gold to see how the answer is graded, --figure"),
        (["--reward", "nowhere.py:f"], "there is no file 'nowhere.py'"),
        (["--reward", whole_number], "needs 'answer'"),
        (["--reward", brevity, "--column", "answer"], "--column: 'answer' is not"),
    ]
    for words, message in cases:
        with subtests.test(f"{words!r:.80}"):
            assert explain(["--response", "5", *words]) == 2
            error = capsys.readouterr().err
            assert message in error
            assert error.count("\n") == 1
