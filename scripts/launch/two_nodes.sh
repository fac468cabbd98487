#!/usr/bin/env bash
# Train on several machines: the same command on each of them, in any order.
#     HEAD=node1:29500 scripts/launch/two_nodes.sh +recipe=fp8_delayed run.name=mine
# HEAD       host and a free port of one of them, where they meet; all must reach it by this name
# NODES      how many machines (default: 2)
# PROCESSES  on each (default: the GPUs there are, of those in CUDA_VISIBLE_DEVICES)
# RESTARTS   how often a run that fails resumes by itself from its last checkpoint (default: 0; more needs run.name)
# JOB        a name for the meeting (default: octet), if others meet at the same HEAD
# parallel=fsdp is set where neither the arguments nor the run that they continue have a layout of several processes.
# All have the same checkout, and see run.dir under the same path. parallel=hsdp keeps most traffic inside a node;
# NCCL_SOCKET_IFNAME and NCCL_IB_HCA say by which network NCCL goes, if it chooses badly.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")") # $0 may be a link to it
top=$(dirname "$(dirname "$here")")
python=python
if [[ -x $top/.venv/bin/python ]]; then python=$top/.venv/bin/python; fi

refuse() {
    echo "octet: error: $1" >&2
    exit 2
}
for name in NODES PROCESSES RESTARTS; do
    [[ ${!name:-1} =~ ^[1-9][0-9]{0,5}$ || $name=${!name} == RESTARTS=0 ]] ||
        refuse "$name=${!name}: not a number from 1 to 999999; give one, or leave it out"
done
nodes=${NODES:-2}
gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU' || true) # without the lines of MIG instances
if [[ -v CUDA_VISIBLE_DEVICES ]]; then
    visible=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d' | grep -c '[^ ]' || true)
    gpus=$((visible < gpus ? visible : gpus))
fi
processes=${PROCESSES:-$gpus}
if ((processes == 0)); then
    where=${CUDA_VISIBLE_DEVICES+ (CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES)}
    refuse "PROCESSES: there is no GPU here$where; set PROCESSES=2, say, to train on the CPU"
fi
if ((nodes == 1)); then
    meeting=(--standalone)
else
    [[ -n ${HEAD:-} ]] || refuse "HEAD: which machine do they meet at? set HEAD=HOST:PORT"
    [[ $HEAD =~ ^.+:[0-9]{1,5}$ || $HEAD != *:* ]] || refuse "HEAD=$HEAD: no host and port; set HEAD=HOST:PORT"
    meeting=(--rdzv_backend=c10d "--rdzv_endpoint=$HEAD" "--rdzv_id=${JOB:-octet}")
fi
# whether the run that the arguments continue has a layout for several processes, which it keeps
has_layout() {
    local word before='' dir=runs name='' run=''
    for word in "${@//[\"\']/}"; do # without Hydra's quotes
        case $before:$word in
        --from-run:*) run=$word ;;
        *:run.resume=never | *:run.resume=auto) ;;
        *:--from-run=* | *:run.resume=*) run=${word#*=} ;;
        *:run.dir=*) dir=${word#*=} ;;
        *:run.name=*) name=${word#*=} ;;
        esac
        before=$word
    done
    run=${run:-${name:+$dir/$name}}
    run=${run%/checkpoints/*}
    [[ -f $run/config.yaml ]] || return 1
    sed -n '/^parallel:/,/^[^ ]/p' "$run/config.yaml" |
        grep -Eq '^ +(replicate|shard|context|tensor|pipeline|expert): *(-|[02-9]|1[0-9])'
}
if [[ " $* " != *" parallel="* ]] && ! has_layout "$@"; then
    first=1 before='' # KEY=VALUE: options stand before them
    for word; do
        [[ $word != *=* || $word == -* || $before == --@(from-run|config-dir) ]] || break
        first=$((first + 1)) before=$word
    done
    set -- "${@:1:first-1}" parallel=fsdp "${@:first}"
fi
# a stop (SIGTERM, Ctrl-C) saves first: torchrun would wait for 30 s and then kill
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # else pages about connections that close when a node is lost
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + processes - 1) / processes))}
exec "$python" "$here/torchrun.py" "--nnodes=$nodes" "--nproc_per_node=$processes" "--max_restarts=${RESTARTS:-0}" \
    "${meeting[@]}" "$top/train.py" "$@"
