"""What the page shows of a run: groups and rollouts of some steps, and why a group has its weight."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from adora_vl.advantage.groups import scheduled
from adora_vl.data.prompts import lettered
from adora_vl.record.manifest import (
    MANIFEST,
    adora_options,
    facts_of_run,
    methods_of,
    read_manifest,
    recipe_of,
)
from adora_vl.record.metrics import METRICS, read_metrics
from adora_vl.record.progress import no_signal
from adora_vl.record.result import result_of
from adora_vl.record.rollouts import IMAGES, ROLLOUTS, SETTINGS, Part, parts, read_part
from adora_vl.report.conversation import TurnReader
from adora_vl.report.story import story_of
from adora_vl.rewards.grade import comparison
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import leads_out, refuse_links_out

# By the option `assign`: what decided the weight in place of the criteria
_CONTROLS = {
    "random": "by chance (assign: random)",
    "reversed": "as the criteria do not say (assign: reversed)",
    "rate": "with a scaled learning rate instead (assign: rate)",
}


def weight_reason(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Why a group has its weight, in one to three sentences.

    Args:
        group: `step` (from 1 on), `weight`, `tds`, `pass_rate`, `longest_right` and `mean_wrong` as
            recorded; `equal`: whether all rewards are the same; `left`: how many of its `size`
            rollouts have no reward.
        settings: the keys of the run, as its record has them.
    """
    if group["left"] == group["size"]:
        return (
            "No rollout of the group has a reward to compare with another, so nothing is learned "
            "from it."
        )
    sentence = _weight(group, settings)
    if group["left"]:
        sentence += (
            f" {group['left']} of {group['size']} rollouts have no reward, and count nowhere."
        )
    if group["equal"] and group["weight"] is not None:
        sentence += (
            " All rewards are equal, so every advantage is 0 and nothing is learned from it."
        )
    return sentence


def _weight(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The sentence on the weight of a group with rewards."""
    weight = group["weight"]
    options = adora_options(settings)
    mode = options["mode"]
    if weight is None:
        return "No weight is recorded."
    verdict = _verdict(group, options)
    if mode == "off" or "adora" not in methods_of(settings):
        return f"{recipe_of(settings)}, weight {weight:g}; ADORA's criteria say {verdict}."
    if weight < 1:
        verb = "Attenuated to"
    elif weight > 1:
        verb = "Amplified to"
    else:
        verb = "Kept at weight"
    control = _CONTROLS.get(options["assign"])
    if control:
        return f"{verb} {weight:g} {control}; ADORA's criteria say {verdict}."
    return f"{verb} {weight:g}: {verdict}."


def _verdict(group: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Whether the criteria call the group TAS or TDS, and why.

    The page shows the figures beside it, rounded once.
    """
    reason_of = {"length": _length, "difficulty": _difficulty, "working": _working}
    criteria = options["criteria"]
    if [*criteria] == ["working"] and options["no_figure"] == "keep" and not _has_work(group):
        return "neither TAS nor TDS, since no work is measured on the problem"
    one_is_enough = [*criteria] == ["difficulty"] or options["combine"] == "any"
    # Whether the difficulty alone may make a group TDS, though no right rollout has a length
    hard_is_enough = "difficulty" in criteria and one_is_enough and not options["needs_correct"]
    if not group["pass_rate"] and not group["tds"] and not hard_is_enough:
        return "neither TAS nor TDS, since no rollout is right"
    reasons = [reason_of[name](group, options) for name in criteria]
    return ", ".join(["TDS" if group["tds"] else "TAS", *reasons])


def _length(group: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What the criterion of length says of the group."""
    return _comparison(
        group,
        options,
        largest=group["longest_right"],
        mean=group["mean_wrong"],
        words=("lengths", "the longest right rollout", "as long as", "longer than"),
    )


def _has_work(group: Mapping[str, Any]) -> bool:
    """Whether the work of the group's rollouts was measured."""
    return group.get("work_right") is not None or group.get("work_wrong") is not None


def _working(group: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What the criterion of work says of the group."""
    if not _has_work(group):
        if options["no_figure"] == "keep":
            return "no work is measured on its problem, so that work says nothing"
        return f"no work is measured on its problem, and {_length(group, options)}"
    return _comparison(
        group,
        options,
        largest=group["work_right"],
        mean=group["work_wrong"],
        words=("work", "the right rollout with most true steps", "as good as", "better than"),
    )


def _comparison(
    group: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    largest: float | None,
    mean: float | None,
    words: tuple[str, str, str, str],
) -> str:
    """What the paper's inequality says of a measure: what it is of, and how it is compared."""
    measure, right, as_much, more = words
    if largest is None:
        return "no rollout is right"
    if mean is None:
        all_right = group["pass_rate"] == 1
        cause = "all rollouts are right" if all_right else "every wrong rollout was cut off"
        outcome = "holding" if options["empty_wrong"] == "keep" else "failing"
        return (
            f"{cause}, so there is no finished wrong one to compare {measure} with, which counts "
            f"as {outcome}"
        )
    if largest == mean:
        outcome = "holding" if options["ties"] == "keep" else "failing"
        return (
            f"{right} is {as_much} the mean of the finished wrong ones, which counts as {outcome}"
        )
    relation = more if largest > mean else f"not {more}"
    return f"{right} is {relation} the mean of the finished wrong ones"


def _difficulty(group: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What the criterion of difficulty says of the group."""
    tau = scheduled(options["tau"]).at(group["step"] - 1)
    if not group["pass_rate"] and options["needs_correct"]:
        return "a pass rate of 0 does not count as difficult"
    relation = "at most" if group["pass_rate"] <= tau else "above"
    return f"the pass rate is {relation} tau, {100 * tau:g} %"


# A rollout in the page's JSON is a list in this order; viewer/groups.js reads it by the same names.
# The completion is last, because the page keeps completions in a separate block.
ROLLOUT = (
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
_GROUP = ("step", "id", "weight", "tds", "pass_rate", "longest_right", "mean_wrong")
_WORK = ("work_right", "work_wrong")  # of groups, in runs whose reward `steps` measures it
# Characters of a text that are shown
_SHOWN_CHARACTERS = 12_000
Json = dict[str, Any]


@dataclass
class RunView:
    """What the page needs to know about one run. Everything in it can be written as JSON."""

    name: str
    metrics: list[Json]
    groups: list[Json] = field(default_factory=list)
    problems: dict[str, Json] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    result: str | None = None  # the result of the run in one line
    story: list[str] = field(default_factory=list)  # what it did and why, in sentences

    @property
    def images(self) -> list[str]:
        """The names of all diagrams, in the order in which the groups show them."""
        turns_index = ROLLOUT.index("turns")
        names = [name for problem in self.problems.values() for name in problem["images"]]
        for group in self.groups:
            for rollout in group["rollouts"]:
                for turn in rollout[turns_index] or ():
                    names += turn["images"]
        # each name once, in the order of their first places
        return list(dict.fromkeys(names))


def load_run(folder: Path, max_rollouts: int) -> RunView:
    """Read a run, also one that is still training.

    `max_rollouts` is how many rollouts are shown at most. `UserError` is raised if the folder is no
    run, or cannot be read.
    """
    try:
        try:
            return _load(folder, max_rollouts)
        # A run that still trains has merged or deleted a file since the files were listed.
        except FileNotFoundError:
            return _load(folder, max_rollouts)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"RUN: the record in {str(folder / ROLLOUTS)!r} cannot be read ({error})"
        ) from error


def _load(folder: Path, max_rollouts: int) -> RunView:
    record = parts(folder / ROLLOUTS)
    files = [folder / METRICS, folder / MANIFEST, *(part.path for part in record)]
    refuse_links_out("RUN", folder, *files)
    metrics = read_metrics(folder / METRICS)
    if not metrics and not record:
        problem = f"has neither {METRICS} nor {ROLLOUTS}/" if folder.is_dir() else "is no folder"
        raise UserError(f"RUN: {str(folder)!r} {problem}; name the output_dir of a training run")
    view = RunView(
        name=folder.resolve().name,
        metrics=metrics,
        facts=facts_of_run(read_manifest(folder)),
        result=result_of(folder, metrics),
    )
    silence = no_signal(metrics)
    if silence:
        view.notes.append(f"Warning: {silence}.")
    if record:
        view.story = story_of(record)
        _add_groups(view, folder, record, max_rollouts)
    else:
        view.notes.append("No rollouts were recorded.")
    return view


def _add_groups(view: RunView, folder: Path, record: list[Part], max_rollouts: int) -> None:
    """Add the groups of the chosen steps, and a note where not all rollouts are shown."""
    steps, total = _chosen_steps(record, max_rollouts)
    for part in record:
        part_steps = [step for step in steps if part.first_step <= step <= part.last_step]
        if not part_steps:
            continue
        table = read_part(part).filter(pc.field("step").isin(part_steps))
        settings = json.loads((table.schema.metadata or {}).get(SETTINGS, b"{}"))
        turn_reader = TurnReader(folder, settings)
        # The rows of a group follow one another.
        for _, rows in groupby(table.to_pylist(), key=itemgetter("step", "group")):
            group_rows = [{**row, "turns": turn_reader.turns(row)} for row in rows]
            view.groups.append(_group(group_rows, settings, view.problems))
    count = sum(len(group["rollouts"]) for group in view.groups)
    if count < total:
        view.notes.append(
            f"{count:,} of {total:,} recorded rollouts are shown, those of {len(steps)} steps."
        )


def _chosen_steps(record: list[Part], max_rollouts: int) -> tuple[list[int], int]:
    """Evenly spread steps whose rollouts fit, and the number of all recorded rollouts.

    One step is chosen at least. Steps are taken to have equally many rollouts.
    """
    counts: dict[int, int] = {}
    for part in record:
        for entry in pc.value_counts(read_part(part, ["step"])["step"]).to_pylist():
            counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
    steps = sorted(counts)
    total = sum(counts.values())
    count = max(1, min(len(steps), int(len(steps) * max_rollouts / total)))
    last = len(steps) - 1
    chosen = [steps[round(number * last / max(1, count - 1))] for number in range(count)]
    return sorted(set(chosen)), total


def _group(rows: list[Json], settings: Json, problems: dict[str, Json]) -> Json:
    """A group as the page's JSON has it, from its recorded rows; its problem is put into `problems`."""
    first = rows[0]
    row_id = str(first["id"])
    problem = {
        # the page shows the pictures beside the text
        "problem": _cut((first["problem"] or "").replace("<image>", "").strip()),
        "choices": [_cut(choice) for choice in lettered(first["choices"] or ())],
        "answer": _cut(first["answer"]),
        "images": first["images"] or [],
    }
    problems.setdefault(row_id, problem)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    group = {name: first[name] for name in _GROUP} | {"id": row_id, "equal": len(set(rewards)) <= 1}
    group |= {name: first.get(name) for name in _WORK}
    group |= {"left": len(rows) - len(rewards), "size": len(rows)}
    return {
        **{name: _rounded(value) for name, value in group.items()},
        "why": weight_reason(group, settings),
        "rollouts": [_rollout(row) for row in rows],
    }


def _rollout(row: Json) -> list[Any]:
    """The values of a rollout in the order of `ROLLOUT`, from its recorded row."""
    rewards = {
        name.removeprefix("reward/"): _rounded(value)
        for name, value in row.items()
        if name.startswith("reward/")
    }
    values = {
        **row,
        "completion": _cut(row["completion"]),
        "extracted": _cut(row["extracted"]),
        "compared": _compared(row),
        "new": row.get("new"),
        "false": row.get("false"),
        "steps": _claims(row),
        "luck": _luck(row),
        # a single reward function says no more than the reward
        "parts": rewards if len(rewards) > 1 else None,
    }
    return [_rounded(values[name]) for name in ROLLOUT]


def _claims(row: Json) -> list[tuple[int, int, str]] | None:
    """The claims of an answer: first and last place in its text, and verdict; None without them.

    JavaScript counts the places of a text in units of UTF-16.
    """
    recorded = row.get("steps")
    text = row["completion"] or ""
    if not isinstance(recorded, str):
        return None
    return [
        (_units(text[:start]), _units(text[:end]), verdict)
        for start, end, verdict in json.loads(recorded)
    ]


def _units(text: str) -> int:
    """The length of a text in units of UTF-16."""
    return len(text.encode("utf-16-le", errors="surrogatepass")) // 2


def _luck(row: Json) -> str | None:
    """What the verdict alone would not say: `lucky`, or `true-steps` to no right answer."""
    new = row.get("new")
    false = row.get("false")
    if new is None or false is None or row["verdict"] is None:
        return None
    if row["verdict"] == "correct":
        return "lucky" if false or not new else None
    return "true-steps" if new and not false else None


def _compared(row: Json) -> list[tuple[str, str, str]] | None:
    """The parts of an answer beside those of the reference answer, each pair with its reason.

    It is None for an answer of one number, and where the grader of today decides otherwise than the
    record. The record does not say how the run read its answers, so each way is tried until one has
    the recorded verdict and reason.
    """
    response = row["completion"]
    reference = row["answer"]
    if row["verdict"] is None or not isinstance(reference, str) or row.get("choices"):
        return None
    for answer_tags in (False, True):
        for rounding in (False, True):
            result = comparison(
                response or "", reference, rounding=rounding, answer_tags=answer_tags
            )
            if result and (result.verdict, result.reason) == (row["verdict"], row["reason"]):
                return [(pair.answer, pair.reference, pair.reason) for pair in result.pairs] or None
    return None


def _rounded(value: Any) -> Any:
    """A float with six digits, which are more than anybody reads, and half as long as all of them."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _cut(text: str | None) -> str | None:
    """The beginning of a long text, with a note on what is left out."""
    if text is None or len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}… ({len(text) - _SHOWN_CHARACTERS:,} more characters)"


def image_uris(
    folders: list[Path], views: list[RunView], max_bytes: int
) -> tuple[dict[str, str], int]:
    """The diagrams as data URIs by name, up to `max_bytes` in total, and how many are left out.

    A diagram that is a link out of its run's folder is left out with a note: the page is passed on,
    and would take any file of this machine along.

    Args:
        folders: the folders of the runs.
        views: what is shown of each run; notes are added.
        max_bytes: the limit of all files together.
    """
    uris: dict[str, str] = {}
    used = 0
    left_out = 0
    for folder, view in zip(folders, views, strict=True):
        links = 0
        for name in view.images:
            path = folder / ROLLOUTS / IMAGES / Path(name).name
            if name in uris or not path.is_file():
                continue
            if leads_out(folder, path):
                links += 1
                continue
            used += path.stat().st_size
            if used > max_bytes:
                left_out += 1
            else:
                uris[name] = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        if links:
            view.notes.append(
                f"{amount(links, 'diagram')} left out: a link leads out of the run's folder."
            )
    return uris, left_out
