"""Whether the model hub answers.

It is asked once and briefly: the hub's library retries each file for minutes.
"""

import os
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session

from adora_vl.utils import compat

_HUB_TIMEOUT_S = 5.0
_SERVER_ERROR = 500


@cache
def hub_unavailable_reason() -> str:
    """Return why the model hub cannot be used, and switch it off if it does not answer.

    The text is empty where the hub answers. The hub is asked once in a process, for at most five
    seconds. If it does not answer, it is switched off for this process: TRL, vLLM, PEFT and
    `datasets` then take what is on this machine, or fail at once.

    The limit is for the whole call, so a thread makes it. An HTTP client's own time-out is for each
    piece of the answer: a proxy that sends a byte now and then could hold it for ever.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    # the HTTP status of the hub's answer; empty until there is one
    statuses: list[int] = []

    def ask() -> None:
        """Ask the hub, and note the status of its answer."""
        # The library has changed its HTTP client before, and with it its errors.
        with suppress(Exception):
            response = get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
            statuses.append(response.status_code)

    thread = threading.Thread(target=ask, name="hub-answers", daemon=True)
    thread.start()
    thread.join(_HUB_TIMEOUT_S)
    has_working_hub = bool(statuses) and statuses[0] < _SERVER_ERROR
    if has_working_hub:
        return ""
    # Switch the hub off as `HF_HUB_OFFLINE=1` does, also for libraries that are imported already.
    os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes
    compat.HUB_OFFLINE.install(True, on=constants)
    if "datasets" in sys.modules:
        compat.DATASETS_OFFLINE.install(True, on=sys.modules["datasets"].config)
    return f"{constants.ENDPOINT} does not answer"


def uses_local_files_only(name: str) -> bool:
    """Return whether a model is looked for on this machine alone: Transformers' `local_files_only`.

    That is so where the name is a folder, or where the hub does not answer.
    """
    return Path(name).is_dir() or bool(hub_unavailable_reason())


def load_failure_reason(name: str, error: BaseException) -> str:
    """Return in one line why a folder or hub id could not be loaded.

    Args:
        name: the folder or hub id.
        error: the error of the library. Its first line is returned, unless the hub does not answer.
            Then that is the reason, and is returned instead.
    """
    hub_problem = "" if Path(name).is_dir() else hub_unavailable_reason()
    if hub_problem:
        return hub_problem
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]


def notes_on_local_copy(name: str) -> list[str]:
    """Return a note for a model whose copy on this machine is used, as the hub does not answer.

    The list is empty for a folder, and where the hub answers.
    """
    hub_problem = "" if Path(name).is_dir() else hub_unavailable_reason()
    return [f"{name}: {hub_problem}; its copy on this machine is used"] if hub_problem else []
