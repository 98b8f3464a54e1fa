"""The KD cache: a teacher's top-K logits on disk, intact or refused.

`format` is the bytes: array layout, codec, records. `build` runs the teacher and commits shards; `read` serves rows to
training; `storage` is a folder or a URL, and the checks of the files in it; `tools` are the commands on a finished
cache. A row goes from disk to a batch through `storage.store`, `format.codec` and `read.dataset`. Only what runs the
teacher (`build.builder`, `build.topk`, `tools.audit`) imports torch, so a process without a model can write, check and
serve a cache. The format in prose, for readers in other languages: `docs/cache-format.md`.
"""
