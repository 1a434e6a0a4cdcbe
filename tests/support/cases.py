"""A table of cases in one test, each a subtest with a folder of its own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

# a subtest with a folder of its own, by its name
CaseFolder = Callable[[object], AbstractContextManager[Path]]


@pytest.fixture
def case_folder(tmp_path: Path, subtests: pytest.Subtests) -> CaseFolder:
    """Return a function with which a test tries all cases of a table: `with case(name) as folder`.

    Each case has an empty folder, and each that fails is listed by its name.
    """

    @contextmanager
    def begun(name: object) -> Iterator[Path]:
        folder = tmp_path / f"case-{len(list(tmp_path.glob('case-*')))}"
        folder.mkdir()
        with subtests.test(f"{name!s:.80}"):
            yield folder

    return begun
