"""`python -m data_prep`, which is `adora-vl data_prep` too."""

from data_prep.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
