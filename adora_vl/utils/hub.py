"""Whether the model hub answers.

It is asked once and briefly: the hub's library retries each file for minutes.
"""

import os
import sys
import threading
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session

from adora_vl.utils import compat

_HUB_SECONDS = 5.0
_SERVER_ERROR = 500


@cache
def no_hub() -> str:
    """Return why the hub cannot be used, in a few words; empty where it answers.

    The result is remembered for later calls. A hub that does not answer within five seconds is not
    asked again in this process: TRL, vLLM, PEFT and `datasets` then take what is on this machine,
    or fail at once. The limit is for the whole call. An HTTP client's own time-out is for each
    piece of the answer, so that a proxy that sends a byte now and then could hold it for ever.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answered: list[bool] = []

    def ask() -> None:
        """Note whether the hub answers without an error of its own."""
        try:
            status = get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS).status_code
        except Exception:  # the library has changed its HTTP client before, and with it its errors
            return
        answered.append(status < _SERVER_ERROR)

    asking = threading.Thread(target=ask, name="hub-answers", daemon=True)
    asking.start()
    asking.join(_HUB_SECONDS)
    if answered == [True]:
        return ""
    # What `HF_HUB_OFFLINE=1` does, also for libraries that are imported already.
    os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes
    compat.HUB_OFFLINE.install(True, on=constants)
    if "datasets" in sys.modules:
        compat.DATASETS_OFFLINE.install(True, on=sys.modules["datasets"].config)
    return f"{constants.ENDPOINT} does not answer"


def only_here(name: str) -> bool:
    """Return whether to look on this machine alone.

    That is so where the name is a folder, or the hub does not answer. Transformers takes this as
    `local_files_only`.
    """
    return Path(name).is_dir() or bool(no_hub())


def why_missing(name: str, error: BaseException) -> str:
    """Return why a folder or hub id could not be loaded.

    The hub does not answer, or else it is the first line of the error.
    """
    missing = "" if Path(name).is_dir() else no_hub()
    return missing or (str(error).strip() or type(error).__name__).splitlines()[0]


def notes_on(name: str) -> list[str]:
    """Return what to tell of a model that was found although the hub does not answer.

    It is no line or one.
    """
    if Path(name).is_dir() or not no_hub():
        return []
    return [f"{name}: {no_hub()}; its copy on this machine is used"]
