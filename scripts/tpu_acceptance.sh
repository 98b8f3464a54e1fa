#!/usr/bin/env bash
# Does it work on this TPU? Makes a toy cache and student, trains 20 steps on 1, 2 and 4 chips each way (a process a
# chip, SPMD, SPMD with sharded weights), compares losses and adapters with one chip's, and prints a table to paste
# into an issue. Every run meets the rendezvous tags, reduces gradients, saves checkpoints and the adapter.
#
#   scripts/tpu_acceptance.sh [FOLDER]                    on a TPU host (CHIPS="1 2 4 8" for other numbers)
#   PJRT_DEVICE=CPU scripts/tpu_acceptance.sh [FOLDER]    to try the script; a process a chip is then not possible
#
# Exit code 1 if a run differs from one chip's, or failed for another reason than a number that is not possible here.
set -uo pipefail
work=${1:-$(mktemp -d)}
read -ra counts <<<"${CHIPS:-1 2 4}"
log="$work/log.txt"
mkdir -p "$work"
echo "works in $work, minutes; details in $log"
# Made on the CPU, in its own process: nothing but the runs may hold the TPU.
env -u PJRT_DEVICE qat-lora smoke --device cpu --out "$work/smoke" --overwrite >>"$log" 2>&1 ||
  { tail -3 "$log"; exit 1; }

train() { # name flags...
  local name=$1 began=$SECONDS
  shift
  qat-lora recover --tpu --checkpoint "$work/smoke/student" --kd-cache-dir "$work/smoke/cache" --recovery-r 4 \
    --batch-size 1 --global-batch-size 8 --max-steps 20 --log-steps 5 --eval-steps 20 --save-steps 10 --overwrite \
    --quiet --out "$work/$name" "$@" >"$work/$name.txt" 2>&1
  echo "$name $? $((SECONDS - began))" >>"$work/exits.txt"
  cat "$work/$name.txt" >>"$log"
}
: >"$work/exits.txt"
train spawn-1 --num-chips 1 # what all others are compared with
for chips in "${counts[@]}"; do
  ((chips == 1)) || train "spawn-$chips" --num-chips "$chips"
  train "spmd-$chips" --num-chips "$chips" --parallel spmd
  ((chips == 1)) || train "sharded-$chips" --num-chips "$chips" --parallel spmd --shard-base
done

python - "$work" <<'PYTHON'
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

from safetensors.numpy import load_file

work = Path(sys.argv[1])


def losses(name):
    file = work / name / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.is_file() else []


def adapter(name):
    return load_file(work / name / "last" / "adapter_model.safetensors")


def said(name):
    lines = (work / f"{name}.txt").read_text().strip().splitlines()
    return (lines[-1] if lines else "no message").replace("|", "/")


versions = {name: importlib.metadata.version(name) for name in ("qat-lora", "torch", "torch_xla")}
accelerator = os.environ.get("TPU_ACCELERATOR_TYPE", "not said by TPU_ACCELERATOR_TYPE")
backend = os.environ.get("PJRT_DEVICE", "")
print(f"\nPJRT_DEVICE={backend}, accelerator {accelerator}, Python {platform.python_version()}, "
      + ", ".join(f"{name} {version}" for name, version in versions.items()) + "; differences to one chip\n")
columns = ("run", "result", "steps", "checkpoints", "largest loss difference", "largest adapter difference", "seconds")
print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
good, bad = losses("spawn-1"), 0
for line in (work / "exits.txt").read_text().splitlines():
    name, code, seconds = line.split()
    mine, saved = losses(name), len(list((work / name / "checkpoints").glob("step-*")))
    if code != "0" or len(mine) != 20 or len(good) != 20:
        refused = code == "2" and "is not possible here" in said(name)
        bad += not refused
        result = "not possible here" if refused else f"FAILED, exit {code}: {said(name)[:140]}"
        print(f"| {name} | {result} | {len(mine)} | {saved} | | | {seconds} |")
        continue
    loss = max(abs(a - b) for a, b in zip(mine, good))
    ours, theirs = adapter(name), adapter("spawn-1")
    weight = max(float(abs(ours[key] - theirs[key]).max()) for key in theirs)
    verdict = "equal" if loss < 1e-3 and weight < 1e-3 else "DIFFERS"
    bad += verdict != "equal"
    print(f"| {name} | {verdict} | {len(mine)} | {saved} | {loss:.1e} | {weight:.1e} | {seconds} |")
sys.exit(bool(bad))
PYTHON
