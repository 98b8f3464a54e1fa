"""The KD cache: a teacher's top-K logits on disk, intact or refused.

`records` says what a cache is, `format` where its bytes lie, `codec` how rows become bytes; `writer`, `reader`,
`dataset`, `verify` and `describe` do what their names say, `parquet` writes rows for other tools, and `shares` divides
the work among several builders. None of them imports torch, so that a cache can be written, checked and served by a
process that holds no model; only `build`, which runs the teacher, `forecast`, which times it, and `audit`, which runs
it again, do. The layout in prose, for readers in other languages: `docs/cache-format.md`.
"""
