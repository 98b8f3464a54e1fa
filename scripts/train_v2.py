"""Train a quantised model itself, on one device; the same as `qat-lora qat`."""

from qat_lora.cli import run_script

if __name__ == "__main__":
    run_script("qat")
