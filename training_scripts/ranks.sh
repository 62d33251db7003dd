# Sourced by the scripts. Puts .venv first in PATH and sets RANKS (one per GPU; without a GPU two, or one on a single
# core), OMP_NUM_THREADS (cores per rank: more threads than cores only spin), DTYPE (auto: the faster number format) and
# a free MASTER_PORT. Values from the environment take precedence.
# `launch MAIN FLAGS...` runs a step on these ranks.
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -d "$top/.venv" ] && export PATH="$top/.venv/bin:$PATH"
cores="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || sysctl -n hw.ncpu)" # nproc limits its result by OMP_NUM_THREADS
case "${CUDA_VISIBLE_DEVICES-0}" in "" | -1) export DS_ACCELERATOR=cpu ;; esac # DeepSpeed's launcher shows the GPUs again
count_gpus() { # respects CUDA_VISIBLE_DEVICES
    if [ "${DS_ACCELERATOR:-}" = cpu ]; then
        echo 0
    elif [ -e /dev/kfd ]; then # AMD
        python -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0
    else # asks the driver: the import of torch takes a second
        python3 -c 'import ctypes
count, cuda = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))
print(count.value)' 2>/dev/null || echo 0
    fi
}
gpus="$(count_gpus)"
if [ "$gpus" -gt 0 ]; then default_ranks="$gpus"; elif [ "$cores" -gt 1 ]; then default_ranks=2; else default_ranks=1; fi
export RANKS="${RANKS:-$default_ranks}"
threads=$((cores / RANKS))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
export DTYPE="${DTYPE:-auto}"
MASTER_PORT="${MASTER_PORT:-$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}"
hostfile="${HOSTFILE:-/job/hostfile}" # DeepSpeed's default; it names the machines of a run on several
launch() { # launch MAIN FLAGS...: like `deepspeed MAIN FLAGS...`, whose command imports torch before it starts anything
    local devices
    devices="$(seq 0 $((RANKS - 1)) | paste -sd, -)"
    if [ "$RANKS" -le "$gpus" ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        devices="$(cut -d, -f"1-$RANKS" <<<"$CUDA_VISIBLE_DEVICES")"
    fi
    if [[ " $* " == *" --dry_run "* && " $* " != *" --measure "* ]]; then # rank 0 alone, as in such a launch
        local all=$((RANKS * ${MACHINES:-1}))
        RANK=0 LOCAL_RANK=0 WORLD_SIZE="$all" LOCAL_WORLD_SIZE="$RANKS" MASTER_ADDR=localhost MASTER_PORT="$MASTER_PORT" \
            python -u "$@" --dry_run_ranks "$all"
        return
    fi
    local log_level=warning
    if [[ " $* " == *" --verbose "* ]]; then log_level=info; fi
    if [ -e "$hostfile" ]; then
        deepspeed --log_level "$log_level" --hostfile "$hostfile" --num_accelerators "$RANKS" --master_port "$MASTER_PORT" "$@"
    elif [ "$RANKS" -gt 1 ]; then # the process that the `deepspeed` command starts on each machine
        local world
        world="$(base64 <<<"{\"localhost\": [\"${devices//,/\", \"}\"]}" | tr -d '\n')"
        python -u -m deepspeed.launcher.launch --world_info="$world" --master_port="$MASTER_PORT" --log_level="$log_level" "$@"
    else # one rank needs no launcher
        if [ "$gpus" -gt 0 ]; then local -x CUDA_VISIBLE_DEVICES="$devices"; fi
        python -u "$@"
    fi
}
trap 'exit 130' INT # Ctrl-C: DeepSpeed's launcher returns 1 after it, as after a failure
is_valid_json() { python -m json.tool "$1" >/dev/null 2>&1; } # is_valid_json FILE: false also if there is no such file
