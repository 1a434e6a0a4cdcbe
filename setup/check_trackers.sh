#!/usr/bin/env bash
# Runs the tests of the trackers with all three installed by their extra. trackio needs an older Pillow than the pins
# have, so the extra goes into an environment of its own (build/trackers), which takes the rest from .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

case "$(sed -n 's/^.*constraints-\(cpu\|gpu\)\.txt.*$/\1/p' setup/install.log | head -n 1)" in
  gpu) constraints=setup/constraints-gpu.txt ;;
  *) constraints=setup/constraints-cpu.txt ;;
esac
environment=build/trackers
rm -rf "$environment"
.venv/bin/python -m venv "$environment"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Behind its own packages, so that the older Pillow is the one that is found.
echo "import site; site.addsitedir('$(site .venv)')" >"$(site "$environment")/over.pth"
# The pins hold, except the one that contradicts the extra.
grep -v -i '^pillow==' "$constraints" >"$environment/constraints.txt"
echo "== Installing the extra 'trackers'"
.venv/bin/python - >"$environment/requirements.txt" <<'PYTHON'
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["trackers"]))
PYTHON
"$environment/bin/python" -m pip --disable-pip-version-check --no-input install -q \
  -c "$environment/constraints.txt" -r "$environment/requirements.txt" >"$environment/install.log" 2>&1 ||
  { tail -n 5 "$environment/install.log" >&2; echo "error: the extra 'trackers' could not be installed" >&2; exit 1; }
OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest -q -p no:cacheprovider tests/unit/record/test_trackers.py
