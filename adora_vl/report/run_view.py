"""What the page shows of a run: groups and rollouts of some steps."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from adora_vl.checkpoint.run_files import read_run_manifest
from adora_vl.checkpoint.store import MANIFEST_FILE
from adora_vl.data.prompts import IMAGE_PLACEHOLDER, with_letters
from adora_vl.record.manifest import describe_run
from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.record.progress import no_signal_warning
from adora_vl.record.record_files import (
    IMAGES_FOLDER,
    ROLLOUTS_FOLDER,
    RecordFile,
    list_record_files,
    read_record_file,
)
from adora_vl.record.result import describe_result
from adora_vl.record.rollouts import SETTINGS_METADATA_KEY
from adora_vl.report.conversation import TurnReader
from adora_vl.report.run_summary import advantages_differ, summarise_run
from adora_vl.report.weight_reason import weight_reason
from adora_vl.rewards.grade import grade
from adora_vl.rewards.structured import parse_reference
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import escapes_folder, refuse_escaping_links

# A rollout in the page's JSON is a list of these values; viewer/groups.js reads it by the same
# names. The completion is last, because the page keeps completions in a separate block.
ROLLOUT_FIELDS = (
    "verdict",
    "extracted",
    "reason",
    "reward",
    "missing",
    "advantage_raw",
    "advantage",
    "length",
    "truncated",
    "drift",
    "segments",
    "age",
    "turns",
    "parts",
    "compared",
    "new",
    "false",
    "steps",
    "luck",
    "completion",
)
# Columns of the record that are the same for all rollouts of a group
_GROUP_COLUMNS = ("step", "id", "weight", "tds", "pass_rate", "longest_right", "mean_wrong")
# Two more of them, in runs whose reward `steps` counts true steps
_STEP_COUNT_COLUMNS = ("work_right", "work_wrong")
# Characters of a text that are shown
_SHOWN_CHARACTERS = 12_000
Json = dict[str, Any]


@dataclass
class RunView:
    """What the page shows of one run. Everything in it can be written as JSON."""

    name: str
    metrics: list[Json]
    """The lines of `metrics.jsonl`."""
    groups: list[Json] = field(default_factory=list)
    """The groups that are shown, each with its rollouts, in the order of the record."""
    problems: dict[str, Json] = field(default_factory=dict)
    """The problems of these groups, by the id of their row."""
    notes: list[str] = field(default_factory=list)
    """Warnings, and what is left out."""
    facts: dict[str, str] = field(default_factory=dict)
    """Texts about the run by their titles, such as its model and its seed."""
    result: str | None = None
    """What the run has achieved, in one line."""
    summary: list[str] = field(default_factory=list)
    """Sentences on what the run learned from, its weights and its lengths (`summarise_run`)."""

    @property
    def images(self) -> list[str]:
        """The file names of all diagrams: those of the problems, then those that tools made."""
        turns_index = ROLLOUT_FIELDS.index("turns")
        names = [name for problem in self.problems.values() for name in problem["images"]]
        for group in self.groups:
            for rollout in group["rollouts"]:
                for turn in rollout[turns_index] or ():
                    names += turn["images"]
        return list(dict.fromkeys(names))  # each name once, in the order of first use


def load_run(folder: Path, max_rollouts: int) -> RunView:
    """Read from the folder of a run what its page shows. The run may still be training.

    Args:
        folder: the output_dir of the run.
        max_rollouts: how many rollouts are shown at most.

    Raises:
        UserError: the folder is no run, or cannot be read.
    """
    try:
        try:
            return _load_once(folder, max_rollouts)
        # A run that still trains may merge or delete a file after the files were listed. It does so
        # once in many steps, so a second attempt succeeds.
        except FileNotFoundError:
            return _load_once(folder, max_rollouts)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"RUN: the record in {str(folder / ROLLOUTS_FOLDER)!r} cannot be read ({error})"
        ) from error


def _load_once(folder: Path, max_rollouts: int) -> RunView:
    """Read a run as `load_run` does; raise `FileNotFoundError` where a file vanishes meanwhile."""
    record_files = list_record_files(folder / ROLLOUTS_FOLDER)
    record_paths = [record_file.path for record_file in record_files]
    # The page is passed on to others, so no link may bring a file from outside into it.
    refuse_escaping_links(
        "RUN", folder, folder / METRICS_FILE, folder / MANIFEST_FILE, *record_paths
    )
    metrics = read_metrics(folder / METRICS_FILE)
    if not metrics and not record_files:
        fault = "is no folder"
        if folder.is_dir():
            fault = f"has neither {METRICS_FILE} nor {ROLLOUTS_FOLDER}/"
        raise UserError(f"RUN: {str(folder)!r} {fault}; name the output_dir of a training run")
    view = RunView(
        name=folder.resolve().name,
        metrics=metrics,
        facts=describe_run(read_run_manifest(folder)),
        result=describe_result(folder, metrics),
    )
    warning = no_signal_warning(metrics)
    if warning is not None:
        view.notes.append(f"Warning: {warning}.")
    if record_files:
        view.summary = summarise_run(record_files)
        _add_groups(view, folder, record_files, max_rollouts)
    else:
        view.notes.append("No rollouts were recorded.")
    return view


def _add_groups(
    view: RunView, folder: Path, record_files: list[RecordFile], max_rollouts: int
) -> None:
    """Add recorded groups to `view`, with a note where not all of them are shown.

    Args:
        view: what is shown of the run; it is changed.
        folder: the output_dir of the run.
        record_files: the files of its record.
        max_rollouts: how many rollouts are shown at most; whole steps are left out for it.
    """
    rollouts_by_step = _count_rollouts(record_files)
    steps = _choose_spread_steps(rollouts_by_step, max_rollouts)
    for record_file in record_files:
        file_steps = [
            step for step in steps if record_file.first_step <= step <= record_file.last_step
        ]
        if not file_steps:
            continue
        table = read_record_file(record_file).filter(pc.field("step").isin(file_steps))
        settings = json.loads((table.schema.metadata or {}).get(SETTINGS_METADATA_KEY, b"{}"))
        turn_reader = TurnReader(folder, settings)
        # The rows of a group follow one another.
        for _, rows in groupby(table.to_pylist(), key=itemgetter("step", "group")):
            group_rows = [{**row, "turns": turn_reader.turns(row)} for row in rows]
            view.problems.setdefault(str(group_rows[0]["id"]), _problem_to_json(group_rows[0]))
            view.groups.append(_group_to_json(group_rows, settings))
    shown_count = sum(len(group["rollouts"]) for group in view.groups)
    total = sum(rollouts_by_step.values())
    if shown_count < total:
        view.notes.append(
            f"{shown_count:,} of {total:,} recorded rollouts are shown, those of {len(steps)} "
            "steps."
        )


def _count_rollouts(record_files: list[RecordFile]) -> dict[int, int]:
    """Return how many rollouts of each step are recorded, by step."""
    rollouts_by_step: dict[int, int] = {}
    for record_file in record_files:
        step_column = read_record_file(record_file, ["step"])["step"]
        for entry in pc.value_counts(step_column).to_pylist():
            step = entry["values"]
            rollouts_by_step[step] = rollouts_by_step.get(step, 0) + entry["counts"]
    return rollouts_by_step


def _choose_spread_steps(rollouts_by_step: Mapping[int, int], max_rollouts: int) -> list[int]:
    """Choose steps, spread evenly over the run, with about `max_rollouts` rollouts at most.

    All steps are assumed to have the same number of rollouts. The first and the last step are
    chosen, unless only one step fits. At least one step is chosen. For example, of the steps 1 to 9
    with 10 rollouts each and at most 30 rollouts, 1, 5 and 9 are chosen.
    """
    steps = sorted(rollouts_by_step)
    total_rollouts = sum(rollouts_by_step.values())
    n_fitting = int(len(steps) * max_rollouts / total_rollouts)
    n_chosen = max(1, min(len(steps), n_fitting))
    n_gaps = max(1, n_chosen - 1)
    last_index = len(steps) - 1
    chosen_steps = {steps[round(number * last_index / n_gaps)] for number in range(n_chosen)}
    return sorted(chosen_steps)


def _problem_to_json(row: Json) -> Json:
    """Return the problem of a recorded rollout as the page's JSON has it."""
    return {
        # the page shows the pictures beside the text
        "problem": _truncate((row["problem"] or "").replace(IMAGE_PLACEHOLDER, "").strip()),
        "choices": [_truncate(choice) for choice in with_letters(row["choices"] or ())],
        "answer": _truncate(row["answer"]),
        "images": row["images"] or [],
    }


def _group_to_json(rows: list[Json], settings: Json) -> Json:
    """Return a group for the page's JSON, with its rollouts and why it has its weight.

    The JSON has short names: `equal` says whether all rewards are the same, `left` how many of the
    `size` rollouts have left the group, and `why` has the reason of the weight in words.

    Args:
        rows: the recorded rows of its rollouts.
        settings: the keys of the run, as its record has them.
    """
    first_row = rows[0]
    rewarded_rows = [row for row in rows if row["reward"] is not None]
    rewards = {row["reward"] for row in rewarded_rows}
    group = {name: first_row[name] for name in _GROUP_COLUMNS}
    group["id"] = str(first_row["id"])
    group["equal"] = len(rewards) <= 1
    group |= {name: first_row.get(name) for name in _STEP_COUNT_COLUMNS}
    # A rollout without a reward has left its group.
    group["left"] = len(rows) - len(rewarded_rows)
    group["size"] = len(rows)
    is_learned_from = advantages_differ(rewarded_rows)
    return {
        **{name: _round_floats(value) for name, value in group.items()},
        "why": weight_reason({**group, "learned": is_learned_from}, settings),
        "rollouts": [_rollout_to_list(row) for row in rows],
    }


def _rollout_to_list(row: Json) -> list[Any]:
    """Return a rollout for the page's JSON: a list of values in the order of `ROLLOUT_FIELDS`.

    `row` is the recorded row of the rollout, with its turns as `TurnReader` returns them.
    """
    rewards = {
        name.removeprefix("reward/"): _round_floats(value)
        for name, value in row.items()
        if name.startswith("reward/")
    }
    values = {
        **row,
        "completion": _truncate(row["completion"]),
        "extracted": _truncate(row["extracted"]),
        # an answer of several parts beside the reference's
        "compared": _compare_answer_parts(row),
        # How many claims on the way to the answer are true and new, and how many are false; where
        # they stand in the text; and a word if the answer is right in spite of them.
        "new": row.get("new"),
        "false": row.get("false"),
        "steps": _claim_spans_in_utf16(row),
        "luck": _luck_label(row),
        # a single reward function says no more than the reward
        "parts": rewards if len(rewards) > 1 else None,
    }
    return [_round_floats(values[name]) for name in ROLLOUT_FIELDS]


class _ClaimSpan(NamedTuple):
    """A claim that an answer makes on its way, and its first and last index in the text."""

    start: int
    end: int
    verdict: str


def _claim_spans_in_utf16(row: Json) -> list[_ClaimSpan] | None:
    """Return where the claims of a rollout stand in its text; None where the run checked none.

    A claim is a step of an answer, such as `angle ABC = 40`. The record counts its start and end in
    characters, as Python does. JavaScript, which reads the page, counts units of UTF-16, so they
    are converted: a claim at the characters 2 to 5 of a text that begins with an emoji gets the
    units 3 to 6.
    """
    recorded = row.get("steps")
    text = row["completion"] or ""
    if not isinstance(recorded, str):
        return None
    return [
        _ClaimSpan(
            start=_utf16_length(text[:start]), end=_utf16_length(text[:end]), verdict=verdict
        )
        for start, end, verdict in json.loads(recorded)
    ]


def _utf16_length(text: str) -> int:
    """Return the length of a text in units of UTF-16, two bytes each."""
    return len(text.encode("utf-16-le", errors="surrogatepass")) // 2


def _luck_label(row: Json) -> str | None:
    """Return a label for a rollout whose answer and whose claims on the way to it disagree.

    A claim is a step of the answer, such as `angle ABC = 40`. The label is one of these:

        lucky         the answer is right, but a claim is false or no claim is true
        true-steps    the answer is not right, but claims are true and none is false
        None          they fit together, or nothing was checked
    """
    # claims that are true and new, and claims that are false, as the reward `steps` counts them
    true_claims = row.get("new")
    false_claims = row.get("false")
    if true_claims is None or false_claims is None or row["verdict"] is None:
        return None
    has_good_steps = true_claims > 0 and false_claims == 0
    is_right = row["verdict"] == "correct"
    if is_right:
        return None if has_good_steps else "lucky"
    return "true-steps" if has_good_steps else None


def _compare_answer_parts(row: Json) -> list[tuple[str, str, str]] | None:
    """Return the parts of an answer beside those of the reference answer, for the page.

    An answer such as `x = 3, y = 4` has several parts. Each becomes a tuple: the part of the
    answer, that of the reference answer, and the grader's reason why they are equal or not.

    The record does not say how the run read its answers (with answer tags, with rounding), so each
    way is tried until one gives the recorded verdict and reason. None if no way does, since today's
    grader decides otherwise. None also for an answer of one number.
    """
    response = row["completion"] or ""
    reference = row["answer"]
    if row["verdict"] is None or not isinstance(reference, str) or row.get("choices"):
        return None
    if not parse_reference(reference).is_structured:
        return None
    for answer_tags in (False, True):
        for rounding in (False, True):
            result = grade(response, reference, rounding=rounding, answer_tags=answer_tags)
            if result.verdict == row["verdict"] and result.reason == row["reason"]:
                parts_of_answer = [
                    (pair.answer, pair.reference, pair.reason) for pair in result.pairs
                ]
                return parts_of_answer or None
    return None


def _round_floats(value: Any) -> Any:
    """Return a float with six significant digits, and any other value as it is.

    Nobody reads more than six, and with all digits the page would be twice as large.
    """
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _truncate(text: str | None) -> str | None:
    """Return the beginning of a long text, with a note on how much is left out."""
    if text is None or len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}… ({len(text) - _SHOWN_CHARACTERS:,} more characters)"


def encode_images(
    folders: list[Path], views: list[RunView], max_bytes: int
) -> tuple[dict[str, str], int]:
    """Encode the diagrams of the runs as data URIs, which the page holds instead of files.

    A diagram that is a link out of its run's folder is left out with a note: the page is passed on,
    and would take any file of this machine along.

    Args:
        folders: the folders of the runs.
        views: what is shown of each run; notes are added.
        max_bytes: the limit of all files together.

    Returns:
        the data URIs by the names of the files, and how many diagrams the limit leaves out.
    """
    uri_by_name: dict[str, str] = {}
    used_bytes = 0
    n_over_limit = 0
    for folder, view in zip(folders, views, strict=True):
        n_links_out = 0
        for name in view.images:
            path = folder / ROLLOUTS_FOLDER / IMAGES_FOLDER / Path(name).name
            if name in uri_by_name or not path.is_file():
                continue
            if escapes_folder(folder, path):
                n_links_out += 1
                continue
            # Once the limit is passed, all further diagrams are left out, small ones too.
            used_bytes += path.stat().st_size
            if used_bytes > max_bytes:
                n_over_limit += 1
            else:
                content = base64.b64encode(path.read_bytes()).decode()
                uri_by_name[name] = f"data:image/png;base64,{content}"
        if n_links_out:
            view.notes.append(
                f"{pluralize(n_links_out, 'diagram')} left out: a link leads out of the run's "
                "folder."
            )
    return uri_by_name, n_over_limit
