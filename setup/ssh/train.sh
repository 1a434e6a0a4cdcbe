#!/usr/bin/env bash
# Trains on several machines over ssh: one launcher on each of them, from the same folder.
#
#   HOSTS="gpu1 gpu2" setup/ssh/train.sh --config configs/train/X.yaml --output_dir /shared/runs/x
#
# All arguments go to `adora_vl.train`. Repository and output_dir are at the same path on all machines, output_dir on a
# disk that they share. Ctrl-C or SIGTERM saves on all machines and ends with 75. This needs bash 5.1. What can be set
# besides HOSTS:
#   PROCESSES_PER_NODE  8
#   MAIN_IP             the address of the first host that the others reach it by; default: its name in HOSTS
#   PORT                29500, a free port of the first host
#   ACCELERATE_CONFIG   configs/accelerate/zero3_nodes.yaml
#   LAUNCH              .venv/bin/accelerate
#   ENVIRONMENT         for the processes, such as "NCCL_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1"
#   GRACE               seconds that machines have to end after another one has failed; default: 60
set -uo pipefail
read -ra hosts <<<"${HOSTS:?the machines, such as HOSTS=\"gpu1 gpu2\"; the first one leads}"
port="${PORT:-29500}"
if ! [[ "$port" =~ ^[1-9][0-9]*$ ]]; then
  echo "error: PORT: $port is no port for several machines; 0 would be another one on each, so choose one from 1024 on" >&2
  exit 2
fi
launch=(
  "${LAUNCH:-.venv/bin/accelerate}" launch
  --config_file "${ACCELERATE_CONFIG:-configs/accelerate/zero3_nodes.yaml}" --deepspeed_multinode_launcher standard
  --num_machines "${#hosts[@]}" --num_processes "$((${#hosts[@]} * ${PROCESSES_PER_NODE:-8}))"
  --main_process_ip "${MAIN_IP:-${hosts[0]}}" --main_process_port "$port"
)
job="/tmp/adora_vl-$$-$RANDOM"
# shellcheck disable=SC2206 # NAME=value words
environment=(${ENVIRONMENT:-})

on() { # HOST COMMAND...
  local host="$1"
  shift
  ssh -o BatchMode=yes "$host" "$(printf '%q ' "$@")" </dev/null
}

# The launcher's processes are looked for below it, because torch starts each of them in a session of its own.
signal() { # SIGNAL HOST-NUMBER
  # A launcher that is only just being started has not left its number yet.
  on "${hosts[$2]}" sh -c 'for _ in 1 2 3 4 5 6 7 8 9 10; do [ -s "$1" ] && break; sleep 1; done; pid=$(cat "$1") && case $2 in KILL) pkill -KILL -P "$pid" ;; esac; kill -s "$2" "$pid"' \
    signal "$job.$2" "$1" 2>/dev/null
}

output_dir=""
for ((i = 1; i <= $#; i++)); do
  case "${!i}" in
    --output_dir) next=$((i + 1)) && output_dir="${!next:-}" ;;
    --output_dir=*) output_dir="${!i#*=}" ;;
  esac
done
if [ -z "$output_dir" ]; then
  echo "error: --output_dir: not among the arguments; this script looks there for what a stopped run leaves behind" >&2
  exit 2
fi
stopping=""
trap 'stopping=1' INT TERM HUP
# shellcheck disable=SC2016 # $1 and $2 are of the other machine's shell
on "${hosts[0]}" sh -c 'cd "$1" && rm -f "$2/stopped.json"' clear "$PWD" "$output_dir" || exit

[ -z "$stopping" ] || exit 143
declare -A rank_of=()
for rank in "${!hosts[@]}"; do
  # accelerate would give each process one thread, with which an optimizer in host memory takes many times as long.
  on "${hosts[$rank]}" sh -c 'echo $$ >"$1"; cd "$2" || exit 2; threads=$(($(nproc) / $3)); shift 3; exec env OMP_NUM_THREADS=$((threads > 0 ? threads : 1)) "$@"' \
    start "$job.$rank" "$PWD" "${PROCESSES_PER_NODE:-8}" "${environment[@]}" "${launch[@]}" --machine_rank "$rank" -m adora_vl.train "$@" \
    > >(sed -u "s/^/${hosts[$rank]}: /") 2> >(sed -u "s/^/${hosts[$rank]}: /" >&2) &
  rank_of[$!]=$rank
done

trap 'stopping=1; signal TERM 0' INT TERM HUP # the ranks agree on the step after which all of them save
[ -z "$stopping" ] || signal TERM 0
code=0
grace="" # a clock, once a machine has failed
while [ "${#rank_of[@]}" -gt 0 ]; do
  ended=""
  wait -n -p ended "${!rank_of[@]}" ${grace:+"$grace"}
  status=$?
  [ -n "${ended:-}" ] || continue # a signal
  if [ "$ended" = "$grace" ]; then
    for left in "${rank_of[@]}"; do signal KILL "$left"; done
    grace=""
    continue
  fi
  rank="${rank_of[$ended]}"
  unset "rank_of[$ended]"
  [ "$status" -ne 0 ] || continue
  if [ "$code" -eq 0 ] && [ "${#rank_of[@]}" -gt 0 ]; then
    # A run that was stopped has written everything by now. One that failed has lost a part of its processes, and the
    # rest would wait for it.
    [ -n "$stopping" ] || echo "${hosts[$rank]} ended with $status; the others have ${GRACE:-60} seconds to end" >&2
    sleep "${GRACE:-60}" >/dev/null 2>&1 &
    grace=$!
  fi
  [ "$code" -ne 0 ] || code=$status
done
[ -z "$grace" ] || kill "$grace" 2>/dev/null

for rank in "${!hosts[@]}"; do on "${hosts[$rank]}" rm -f "$job.$rank"; done
# The launcher replaces the exit code 75 of a stopped run by its own.
# shellcheck disable=SC2016
if on "${hosts[0]}" sh -c 'cd "$1" && test -e "$2/stopped.json"' look "$PWD" "$output_dir"; then exit 75; fi
exit "$code"
