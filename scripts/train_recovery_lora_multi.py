"""Train a recovery adapter on all chips, or `--num-chips N`; the same as `qat-lora recover --num-chips all`."""

from qat_lora.cli import run_script

if __name__ == "__main__":
    run_script("recover --num-chips all")
