# Sourced by tpu_acceptance.sh and gpu_acceptance.sh: a toy cache and student, training runs on them, and other checks.
set -uo pipefail
work=${1:-$(mktemp -d)}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log="$work/log.txt"
mkdir -p "$work"
rm -f "$work/steps.jsonl"
: >"$work/exits.txt" >"$work/checks.txt"
echo "works in $work, minutes; details in $log"

make_toy() { # on the CPU, in a process of its own: nothing but the runs may hold the device
  env -u PJRT_DEVICE qat-lora smoke --device cpu --out "$work/smoke" --overwrite >>"$log" 2>&1 ||
    { tail -3 "$log"; exit 1; }
}

train() { # name flags...
  local name=$1 began=$SECONDS
  shift
  qat-lora recover --checkpoint "$work/smoke/student" --kd-cache-dir "$work/smoke/cache" --recovery-r 4 \
    --batch-size 1 --global-batch-size 8 --max-steps 20 --log-steps 5 --eval-steps 20 --save-steps 10 --overwrite \
    --out "$work/$name" "$@" >"$work/$name.txt" 2>&1
  echo "$name $? $((SECONDS - began))" >>"$work/exits.txt"
  cat "$work/$name.txt" >>"$log"
}

check() { # name command...
  local name=$1 began=$SECONDS
  shift
  "$@" >>"$log" 2>&1
  echo "$name $? $((SECONDS - began))" >>"$work/checks.txt"
}
