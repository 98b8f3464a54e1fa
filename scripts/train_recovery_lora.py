"""Train a recovery adapter on one device; the same as `qat-lora recover`."""

from qat_lora.cli import run_script

if __name__ == "__main__":
    run_script("recover")
