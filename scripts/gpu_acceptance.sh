#!/usr/bin/env bash
# Does it work on this GPU? In about ten minutes: doctor, the loss kernel against float64, a training step (graphs,
# stops of the queue, tokens/s, memory beside the estimate) compiled and not, and a toy's training on the CPU, on one
# GPU, and on several with frozen weights copied and sharded. Prints tables to paste into an issue.
#
#   scripts/gpu_acceptance.sh [FOLDER]                      in a checkout with `pip install -e '.[dev]'`
#   DEVICE=cpu GPUS=2 scripts/gpu_acceptance.sh [FOLDER]    to try the script
#
# Exit code 1 if a run differs from the CPU's, or anything failed.
source "$(dirname "$0")/acceptance_runs.sh"
device=${DEVICE:-cuda}
gpus=${GPUS:-$(python -c 'import torch; print(torch.cuda.device_count())')}
check doctor qat-lora doctor
check kernel env KERNEL_DEVICE="$device" python -m pytest -q -n 0 "$root/tests/losses/test_losses_by_kernel.py"
check step python "$root/benchmarks/acceptance.py" step "$work" --device "$device"
check step-uncompiled env TORCH_COMPILE_DISABLE=1 python "$root/benchmarks/acceptance.py" step "$work" --device "$device"
make_toy
train cpu-1 --device cpu # what all others are compared with
train gpu-1 --device "$device"
TORCH_COMPILE_DISABLE=1 train gpu-1-uncompiled --device "$device"
for ((n = 2; n <= gpus; n *= 2)); do
  train "gpu-$n" --device "$device" --num-chips "$n"
  train "gpu-$n-sharded" --device "$device" --num-chips "$n" --shard-base
done
python "$root/benchmarks/acceptance.py" table "$work"
