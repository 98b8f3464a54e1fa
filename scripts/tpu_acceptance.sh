#!/usr/bin/env bash
# Does it work on this TPU? Makes a toy cache and student, trains 20 steps on 1, 2 and 4 chips each way (a process a
# chip, SPMD, SPMD with sharded weights), compares losses and adapters with one chip's, and prints a table to paste
# into an issue. Every run meets the rendezvous tags, reduces gradients, saves checkpoints and the adapter.
#
#   scripts/tpu_acceptance.sh [FOLDER]                    on a TPU host (CHIPS="1 2 4 8" for other numbers)
#   PJRT_DEVICE=CPU scripts/tpu_acceptance.sh [FOLDER]    to try the script; a process a chip is then not possible
#
# Exit code 1 if a run differs from one chip's, or failed for another reason than a number that is not possible here.
source "$(dirname "$0")/acceptance_runs.sh"
read -ra counts <<<"${CHIPS:-1 2 4}"
make_toy
train spawn-1 --tpu --num-chips 1 # what all others are compared with
for chips in "${counts[@]}"; do
  ((chips == 1)) || train "spawn-$chips" --tpu --num-chips "$chips"
  train "spmd-$chips" --tpu --num-chips "$chips" --parallel spmd
  ((chips == 1)) || train "sharded-$chips" --tpu --num-chips "$chips" --parallel spmd --shard-base
done
PJRT_DEVICE=${PJRT_DEVICE:-TPU} python "$root/benchmarks/acceptance.py" table "$work"
