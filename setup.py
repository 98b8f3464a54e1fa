"""What pyproject.toml cannot say: recipes, notebooks and scripts travel in the wheel, for `qat-lora examples`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = {"recipes": "*.*", "notebooks": "*.ipynb", "scripts": "*.py"}


class BuildWithExamples(build_py):
    """Copies the examples beside the package; an editable install has them where they are."""

    def run(self) -> None:
        super().run()
        for folder, pattern in {} if self.editable_mode else EXAMPLES.items():
            there = Path(self.build_lib) / "qat_lora" / "examples" / folder
            there.mkdir(parents=True, exist_ok=True)
            for file in Path(folder).glob(pattern):
                shutil.copy(file, there)


setup(cmdclass={"build_py": BuildWithExamples})
