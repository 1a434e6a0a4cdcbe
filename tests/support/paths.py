"""Where this checkout lies, and what lies beside it."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHARED_FOLDER = REPOSITORY.parent / "shared"
