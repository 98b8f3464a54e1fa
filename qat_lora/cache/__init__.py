"""The KD cache: a teacher's top-K logits on disk, intact or refused.

`format` is the bytes, `build` runs the teacher and commits shards, `read` serves rows to training, `storage` is a
folder or a URL and the checks of the files in it, `tools` are the commands on a finished cache. Only what runs the
teacher imports torch, so a process without a model can write, check and serve one. In prose: `docs/cache-format.md`.
"""
