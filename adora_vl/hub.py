"""Whether the model hub answers: asked once and briefly, for the hub's library tries each file again for minutes."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session

from adora_vl import compat

_HUB_SECONDS = 5.0
_SERVER_ERROR = 500


@cache
def no_hub() -> str:
    """Why the hub gives nothing, in a few words, and an empty text where it answers. Later calls know it.

    A hub that does not work within five seconds is not asked again by anybody in this process: TRL, vLLM, PEFT and
    `datasets` then take what is on this machine, or fail at once.

    The time limit is over everything. The one that an HTTP client takes is for each piece of the answer, so a proxy
    that sends a byte now and then would hold it for good.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answered: list[bool] = []

    def ask() -> None:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS).status_code
        except Exception:  # of a library that has changed its HTTP client before
            return
        answered.append(status < _SERVER_ERROR)

    asking = threading.Thread(target=ask, name="hub-answers", daemon=True)
    asking.start()
    asking.join(_HUB_SECONDS)
    if answered == [True]:
        return ""
    _go_offline()
    return f"{constants.ENDPOINT} does not answer"


def _go_offline() -> None:
    """What `HF_HUB_OFFLINE=1` does, which the libraries read when they are imported: before it was known."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes
    compat.HUB_OFFLINE.install(True, on=constants)
    if "datasets" in sys.modules:
        compat.DATASETS_OFFLINE.install(True, on=sys.modules["datasets"].config)


def only_here(name: str) -> bool:
    """Whether to look on this machine alone: for a folder, and for a hub id where the hub does not answer.

    It is what `local_files_only` of Transformers takes.
    """
    return Path(name).is_dir() or bool(no_hub())


def why_missing(name: str, error: BaseException) -> str:
    """Why a folder or hub id could not be loaded: the hub gives nothing, or else the first line of the error."""
    missing = "" if Path(name).is_dir() else no_hub()
    return missing or (str(error).strip() or type(error).__name__).splitlines()[0]


def notes_on(name: str) -> list[str]:
    """What to tell the user of a model that was found although the hub gives nothing: no line or one."""
    if Path(name).is_dir() or not no_hub():
        return []
    return [f"{name}: {no_hub()}; its copy on this machine is used"]
