"""Text behind URLs: fetched once, the same documents and the same identity as in a folder; refusals in one line."""

import fsspec
import pytest

from qat_lora.data import sources
from qat_lora.data.sources import TextConfig, describe_source, open_documents
from qat_lora.errors import MissingExtraError, TextError


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """An empty memory:// with two files, and copies of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    memory.pipe_file("/bucket/books/a.txt", b"first book")
    memory.pipe_file("/bucket/books/more/b.jsonl", b'{"text": "second"}\n{"text": "third"}\n')
    sources.fetched.cache_clear()
    return memory


def texts(name):
    return ["".join(document.parts()) for document in open_documents(TextConfig(dataset=name))]


def test_a_folder_behind_a_url_is_the_folder(tmp_path, store):
    local = tmp_path / "books"
    (local / "more").mkdir(parents=True)
    (local / "a.txt").write_text("first book")
    (local / "more/b.jsonl").write_text('{"text": "second"}\n{"text": "third"}\n')
    url = "memory://bucket/books"
    assert texts(url) == texts(str(local)) == texts(f"file://{local}") == ["first book", "second", "third"]
    assert describe_source(TextConfig(dataset=url)) == describe_source(TextConfig(dataset=str(local)))


def test_a_file_is_fetched_once_and_again_when_it_changed(store, monkeypatch):
    got = []
    fetch = type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda self, path, *rest: got.append(path) or fetch(self, path, *rest))
    url = "memory://bucket/books/a.txt"
    for _ in range(2):
        sources.fetched.cache_clear()  # as in another process
        assert texts(url) == ["first book"]
    assert got == ["/bucket/books/a.txt"]
    store.pipe_file("/bucket/books/a.txt", b"another text")
    sources.fetched.cache_clear()
    assert texts(url) == ["another text"] and len(got) == 2
    assert not [p for p in sources.fetched(url).parents[1].iterdir() if p.name.startswith(".")]


def test_what_cannot_be_read_is_one_line(store, monkeypatch):
    with pytest.raises(TextError, match=r"memory://bucket/none: nothing is there"):
        texts("memory://bucket/none")
    with pytest.raises(TextError, match="cannot be read"):
        texts("nosuch://KEY:SECRET@bucket/none")
    monkeypatch.setattr(type(store), "find", lambda *a, **k: (_ for _ in ()).throw(OSError("KEY:SECRET refused")))
    with pytest.raises(TextError) as caught:
        texts("memory://KEY:SECRET@bucket/books")
    assert "SECRET" not in str(caught.value)


def test_a_missing_driver_names_its_extra(monkeypatch):
    def missing(url):
        raise ImportError("install s3fs")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'qat-lora\[s3\]'"):
        texts("s3://bucket/books")


def test_a_name_that_leads_out_of_its_folder_is_refused(store, tmp_path, monkeypatch):
    found = {"/bucket/books/../../../../out.txt": {"type": "file", "size": 1}}
    monkeypatch.setattr(type(store), "find", lambda *a, **k: found)
    with pytest.raises(TextError, match="leads out of its folder"):
        texts("memory://bucket/books")
