"""Folders of runs with a record of their rollouts, written without a training, and report pages."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from adora_vl.record.rollouts import RolloutStore
from adora_vl.report.__main__ import main

# HTML that sets the page's title to "owned" by a script, wherever a page does not escape it.
ATTACKING_HTML = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</script></p></article><iframe "
    "src='javascript:parent.document.title=`owned`'></iframe>'\">{{SCRIPT}}<svg "
    "onload='document.title=`owned`'>"
)
# The settings of a method, as the record of a run has them.
ADORA_SETTINGS = {"adora_method": {"adora": {"mode": "attenuation", "factor": 0.1}}}


# What a model sees of a picture of 60 x 40: all of it, in steps of 20 pixels
VIEW_LIMITS = {"low": 400, "high": 4000, "unit": 20, "relative": False}


def turns_with_one_zoom() -> list[dict[str, Any]]:
    """Return the turns of a rollout that zooms once into its picture, and answers."""
    arguments = '{"x1": 0, "y1": 20, "x2": 30, "y2": 40}'  # the lower left of the picture
    call = f'<tool_call>{{"name": "zoom", "arguments": {arguments}}}</tool_call>'
    turn = {"tokens": 3, "images": list[str](), "seconds": 0.0, "failed": False}
    return [
        {**turn, "by": "model", "text": f"I look. {call}"},
        {**turn, "by": "tool", "text": "<image>", "seconds": 4.4e-4},
        {**turn, "by": "model", "text": "It is 7."},
    ]


def _recorded_row(step: int, *, group: int, rollout: int, group_size: int) -> dict[str, Any]:
    """Return the recorded columns of a rollout, but for its images.

    The first `group` rollouts of a group are right. `rollout`: its number in the group.
    """
    is_right = rollout < group
    return {
        "step": step,
        "id": f"problem/{group}",
        "problem": f"Find x in {group}.",
        "choices": ["5", "$7$"],
        "answer": "7",
        "verdict": "correct" if is_right else "wrong",
        "extracted": "7" if is_right else "8",
        "completion": f"step {step}: \\boxed{{{7 if is_right else 8}}}",
        "reason": "same_number",
        "reward": 1.0 if is_right else 0.1,
        "advantage_raw": 1.5 if is_right else -0.5,
        "advantage": 0.15 if is_right else -0.05,
        "weight": 0.1 if group == 1 else 1.0,
        "tds": group == 1,
        "pass_rate": group / group_size,
        "longest_right": 10.0 * step if group else None,
        "mean_wrong": 20.0,
        "length": 10 * step,
        "truncated": False,
        "drift": 1e-6,
    }


def write_recorded_run(
    folder: Path,
    /,
    *,
    step_count: int,
    groups: int = 2,
    rollouts: int = 4,
    settings: Mapping[str, object] = ADORA_SETTINGS,
    **texts: object,
) -> Path:
    """Write the record and metrics of a run into `folder`, which is returned.

    In every step the group number g has g right rollouts; in step s each has 10 * s tokens. Group 1
    has the weight 0.1 of ADORA's attenuation, the others 1.

    Args:
        folder: the run folder.
        step_count: the number of optimizer steps; a column may have the name `steps`.
        groups: groups of a step.
        rollouts: rollouts of a group.
        settings: the settings of the method, as the record has them.
        texts: columns that every rollout has in place of its own, such as `completion="..."`.
    """
    record = RolloutStore(folder, limit_gb=1, settings=settings)
    record.start(0)
    picture = Image.new("RGB", (60, 40), "white")
    for step in range(1, step_count + 1):
        rows: dict[str, list[Any]] = {}
        for number in range(groups * rollouts):
            group, rollout = divmod(number, rollouts)
            row = {
                **_recorded_row(step, group=group, rollout=rollout, group_size=rollouts),
                "images": record.diagrams.store(f"problem/{group}", [picture]),
                **texts,
            }
            for name, value in row.items():
                rows.setdefault(name, []).append(value)
        record.add(rows, rollouts)
        record.flush(step)
    metrics = {"kind": "train", "adora/pass_rate": 0.5}
    lines = [
        {"step": step, "reward": step / 10, "kl": step / 100, **metrics}
        for step in range(1, step_count + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_report_page(output: Path, *runs: Path, argv: tuple[str, ...] = ()) -> Path:
    """Write the page of these runs with the report's command, and return `output`.

    `argv`: further arguments of the command.
    """
    assert main([*map(str, runs), "--output", str(output), *argv]) == 0
    return output


def write_attacked_page(folder: Path) -> Path:
    """Write the page of a run in which every text is HTML that tries to run a script; return it."""
    texts: Any = dict.fromkeys(
        ("id", "problem", "answer", "completion", "verdict", "extracted", "reason"), ATTACKING_HTML
    )
    folder_name = ATTACKING_HTML.replace("/", "_")[:100]  # a name may have 255 bytes
    run = write_recorded_run(folder / folder_name, step_count=2, **texts)
    metrics = {"step": 3, "kind": "train", "reward": 1.0}
    metrics |= {ATTACKING_HTML: 2.0, "note": ATTACKING_HTML}
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(metrics) + "\n")
    return write_report_page(folder / "page.html", run)
