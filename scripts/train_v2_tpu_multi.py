"""Train a quantised student itself on all chips, or `--num-chips N`; the same as `qat-lora qat --num-chips all`."""

from qat_lora.cli import run_script

if __name__ == "__main__":
    run_script("qat --num-chips all")
