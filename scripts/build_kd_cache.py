"""Build a KD cache; the same as `qat-lora cache build`."""

from qat_lora.cli import run_script

if __name__ == "__main__":
    run_script("cache build")
