"""An object store for tests that spans processes: `bucket://`, kept in the folder QAT_LORA_TEST_BUCKET.

Like the real ones it shows an object whole or not at all and lets one of several create-only puts succeed. A process
can be killed while it sends (`failpoint("send:<name>")`), and an answer can get lost. `NaiveBucket` ignores that a put
is to create: what a driver without that request would do, and the positive control of the tests.
"""

import os
import tempfile
from pathlib import Path

import fsspec
from fsspec.spec import AbstractFileSystem

from qat_lora.files.folders import failpoint


class Bucket(AbstractFileSystem):
    protocol = "bucket"
    cachable = False
    lost_answers = 0
    transferred: dict[str, int] = {}

    @property
    def root(self) -> Path:
        return Path(os.environ["QAT_LORA_TEST_BUCKET"])

    def _file(self, path):
        return self.root / self._strip_protocol(path).strip("/").replace("/", "%")

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.root.parent, delete=False) as sent:
            sent.write(value[: len(value) // 2])
            sent.flush()
            failpoint("send")
            sent.write(value[len(value) // 2 :])
        if mode == "create":
            os.link(sent.name, self._file(path))
            os.unlink(sent.name)
        else:
            os.replace(sent.name, self._file(path))
        failpoint("sent")
        if type(self).lost_answers:
            type(self).lost_answers -= 1
            raise self.again(path, value, mode)

    def again(self, path, value, mode):
        """What a driver does that got no answer: it asks again and is told that the name is taken."""
        return FileExistsError(path) if mode == "create" else TimeoutError(path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = self._file(path).read_bytes()[start:end]
        name = path.rsplit("/", 1)[-1]
        self.transferred[name] = self.transferred.get(name, 0) + len(data)
        return data

    def info(self, path, **kwargs):
        return {"name": path, "type": "file", "size": self._file(path).stat().st_size}

    def ls(self, path, detail=True, **kwargs):
        folder = self._strip_protocol(path).strip("/")
        prefix = folder.replace("/", "%") + "%"
        names = [file.name for file in self.root.iterdir()] if self.root.is_dir() else []
        found = [f"{folder}/{name.removeprefix(prefix)}" for name in names if name.startswith(prefix)]
        return [self.info(name) for name in found] if detail else found

    def rm_file(self, path):
        self._file(path).unlink()


class NaiveBucket(Bucket):
    protocol = "naive"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value)


for _store in (Bucket, NaiveBucket):
    fsspec.register_implementation(_store.protocol, _store, clobber=True)
