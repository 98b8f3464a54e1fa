"""Register our quantiser with transformers at the moment when transformers is imported, and not before.

transformers has no plug-in entry points: a quantiser is known once somebody registers it. Importing transformers to do
so would cost every `import qat_lora` seconds, and would decide whether it uses PyTorch/XLA before a device is chosen.
So an import hook waits for one module name and imports `qat_lora.models.hf_quantizer` right after it.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TARGET, FOLLOWER = "transformers.quantizers", "qat_lora.models.hf_quantizer"


def _import_ours_after(loader: Loader) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        importlib.import_module(FOLLOWER)

    loader.exec_module = exec_module  # type: ignore[method-assign]


class _Finder(MetaPathFinder):
    """Finds the target, and nothing else, through the finders behind this one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the target's spec, whose loader imports ours too."""
        if name != TARGET:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _import_ours_after(spec.loader)
                return spec
        return None


def register_with_transformers() -> None:
    """Register our quantiser now where transformers' quantizers are imported, else as soon as they are."""
    if TARGET in sys.modules:
        importlib.import_module(FOLLOWER)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
