"""Check device, data, training and checkpoints; the same as `qat-lora smoke`."""

from qat_lora.cli import run_script

if __name__ == "__main__":
    run_script("smoke")
