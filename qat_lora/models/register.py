"""Make our checkpoints known to transformers without importing it: when it comes, so do we.

transformers has no plug-in entry points; a quantiser is known once somebody registers it. Importing transformers to
do so would cost every `import qat_lora` seconds, and would settle whether it uses PyTorch/XLA before a device is
chosen. So a finder stands in front of Python's own, looks for one name, and lets the import of that module be
followed by the import of `qat_lora.models.hf_quantizer`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TARGET, FOLLOWER = "transformers.quantizers", "qat_lora.models.hf_quantizer"


class _FollowedLoader(Loader):
    """Another loader, and one import after it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the real loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with its real loader in place, then import ours."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        importlib.import_module(FOLLOWER)


class _Finder(MetaPathFinder):
    """Finds the target as the finders behind this one do, and nothing else."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the target's spec with a followed loader."""
        if name != TARGET:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _FollowedLoader(spec.loader)
                return spec
        return None


def register_with_transformers() -> None:
    """Register our quantiser now where transformers' quantizers are imported, else as soon as they are."""
    if TARGET in sys.modules:
        importlib.import_module(FOLLOWER)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
