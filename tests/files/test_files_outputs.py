"""Output folders: new, resumed, complete, another run's, somebody else's, overwritten; and kills in between."""

import json
import os
import shutil
from pathlib import Path

import pytest

from qat_lora.errors import OutputExistsError
from qat_lora.files import outputs
from qat_lora.files.folders import LIST, MARK, atomic_dir, listed, ours, release, write_text
from qat_lora.files.outputs import claim, complete

SETTINGS = {"seed": 1, "nested": {"lr": 0.1, "list": (1, 2)}, "none": None}


def tree(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in folder.rglob("*")}


def test_new_then_resumed_then_complete(tmp_path):
    out = tmp_path / "deep" / "run"
    assert claim(out, "recover", SETTINGS, False) is False
    ours(out / "work").write_text("half")
    before = tree(out)
    assert claim(out, "recover", SETTINGS, False) is False and tree(out) == before
    complete(out)
    before = tree(out)
    assert claim(out, "recover", SETTINGS, False) is True and tree(out) == before
    assert sorted(path.name for path in out.iterdir()) == [LIST, MARK, "work"]


@pytest.mark.parametrize(
    ("command", "changed", "name"),
    [
        ("quantize", {}, 'command was "recover", now "quantize"'),
        ("recover", {"seed": 2}, "seed was 1, now 2"),
        ("recover", {"nested": {"lr": 0.2, "list": (1, 2)}}, "nested.lr was 0.1, now 0.2"),
        ("recover", {"none": 0}, "none was null, now 0"),
        ("recover", {"more": 5}, "more was null, now 5"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_another_run_is_refused_by_name_and_untouched(tmp_path, command, changed, name, finished):
    claim(tmp_path / "out", "recover", SETTINGS, False)
    if finished:
        complete(tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(OutputExistsError) as caught:
        claim(tmp_path / "out", command, {**SETTINGS, **changed}, False)
    assert name in str(caught.value) and "--overwrite" in str(caught.value) and caught.value.exit_code == 2
    assert tree(tmp_path) == before


def test_credentials_are_not_in_the_mark_and_old_marks_that_hold_them_still_fit(tmp_path, monkeypatch):
    """They decide no content: the same text with another key is the same run, another text is not."""

    def settings(secret, name="t"):
        return {"text": {"dataset": f"s3://KEY:{secret}@b/{name}"}, "domain": [f"web=https://u:{secret}@h/{name}"]}

    claim(tmp_path / "new", "eval", settings("S3CR3T"), False)
    complete(tmp_path / "new")
    with monkeypatch.context() as before:  # as older releases wrote it
        before.setattr(outputs, "redact", str)
        claim(tmp_path / "old", "eval", settings("S3CR3T"), False)
    assert "S3CR3T" in (tmp_path / "old" / MARK).read_text()
    assert claim(tmp_path / "old", "eval", settings("S3CR3T"), False) is False
    complete(tmp_path / "old")
    for out in (tmp_path / "new", tmp_path / "old"):
        text = (out / MARK).read_text()
        assert "S3CR3T" not in text and "KEY" not in text and "s3://***@b/t" in text and "web=https://***@h/t" in text
        assert claim(out, "eval", settings("S3CR3T"), False) is True
        assert claim(out, "eval", settings("0TH3R"), False) is True
        with pytest.raises(OutputExistsError, match="text.dataset was"):
            claim(out, "eval", settings("S3CR3T", "other") | {"domain": settings("S3CR3T")["domain"]}, False)


def test_a_setting_that_is_gone_is_named(tmp_path):
    claim(tmp_path, "recover", SETTINGS, False)
    with pytest.raises(OutputExistsError, match="seed was 1, now null"):
        claim(tmp_path, "recover", {"nested": SETTINGS["nested"]}, False)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", ["file", "hidden", "folder", "looks like ours"])
def test_a_folder_that_is_not_ours_is_never_touched(tmp_path, overwrite, what):
    if what == "folder":
        (tmp_path / "thesis").mkdir()
    else:
        (tmp_path / {"file": "thesis.tex", "hidden": ".git", "looks like ours": "config.yaml"}[what]).write_text("1")
    before = tree(tmp_path)
    with pytest.raises(OutputExistsError, match="no qat-lora run made"):
        claim(tmp_path, "recover", SETTINGS, overwrite)
    assert tree(tmp_path) == before


def test_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputExistsError, match="is a file"):
        claim(tmp_path / "out", "recover", SETTINGS, True)
    assert (tmp_path / "out").read_text() == "mine"


def old_run(out):
    claim(out, "recover", SETTINGS, False)
    (out / "best" / "base").mkdir(parents=True)
    ours(out / "best" / "base" / "weights").write_text("old")
    ours(out / "metrics.jsonl").write_text("old")
    complete(out)


@pytest.mark.parametrize("settings", [SETTINGS, {"seed": 7}])
def test_overwrite_leaves_nothing_of_the_run_before(tmp_path, settings):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    out = tmp_path / "out"
    old_run(out)
    (out / "link").symlink_to(outside)
    assert claim(out, "recover", settings, True) is False
    assert sorted(path.name for path in out.iterdir()) == ["link", LIST, MARK]
    assert (outside / "kept").read_text() == "mine"
    assert claim(out, "recover", settings, False) is False


def test_overwrite_works_on_a_linked_folder_and_a_missing_one(tmp_path):
    old_run(tmp_path / "real")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    assert claim(tmp_path / "out", "recover", {"seed": 2}, True) is False
    assert (tmp_path / "out").is_symlink() and not (tmp_path / "real" / "best").exists()
    assert claim(tmp_path / "new", "recover", SETTINGS, True) is False


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": 3, "complete": true}', "{}"])
def test_a_damaged_mark_is_an_error_for_people(tmp_path, text):
    old_run(tmp_path)
    (tmp_path / MARK).write_text(text)
    with pytest.raises(OutputExistsError, match="damaged.*--overwrite"):
        claim(tmp_path, "recover", SETTINGS, False)
    assert claim(tmp_path, "recover", SETTINGS, True) is False


class Killed(BaseException):
    pass


def test_a_kill_while_overwriting_leaves_no_run_that_looks_whole(tmp_path, monkeypatch):
    """Killed at every removal: the old settings are not taken for complete, and --overwrite goes on."""
    removals = 0
    for allowed in range(40):
        out = tmp_path / f"out{allowed}"
        old_run(out)
        left = [allowed]

        def counted(real, left=left):
            def remove(*arguments, **named):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return real(*arguments, **named)

            return remove

        with monkeypatch.context() as patch:
            for name in ("unlink", "rmdir", "replace"):
                patch.setattr(os, name, counted(getattr(os, name)))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            try:
                claim(out, "recover", SETTINGS, True)
            except Killed:
                removals += 1
            else:
                break
        if "seed" in (out / MARK).read_text():  # the mark is the old run's: nothing of it is gone
            assert claim(out, "recover", SETTINGS, False) is True
        else:
            with pytest.raises(OutputExistsError, match="--overwrite"):
                claim(out, "recover", SETTINGS, False)
        assert claim(out, "recover", SETTINGS, True) is False
        assert sorted(path.name for path in out.iterdir()) == [LIST, MARK]
    assert removals >= 5


def test_a_kill_while_a_folder_is_first_marked_does_not_lock_it(tmp_path, monkeypatch):
    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            patch.setattr(Path, "unlink", killed)  # a kill cleans nothing up
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / f".tmp-{MARK}").write_text('{\n "sett')
            claim(tmp_path / "out", "recover", SETTINGS, False)
    assert any((tmp_path / "out").iterdir())
    assert claim(tmp_path / "out", "recover", SETTINGS, False) is False
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [LIST, MARK]


def test_completing_keeps_the_settings(tmp_path):
    claim(tmp_path, "eval", SETTINGS, False)
    complete(tmp_path)
    mark = json.loads((tmp_path / MARK).read_text())
    assert mark["complete"] and mark["settings"] == {"command": "eval", **json.loads(json.dumps(SETTINGS))}
    assert outputs.claim(tmp_path, "eval", SETTINGS, False)
    shutil.rmtree(tmp_path)


def hold(folder, ready, end):
    with outputs.lock_dir(folder):
        ready.set()
        end.wait(30)


def test_a_folder_is_worked_in_by_one_process_at_a_time(tmp_path):
    """Two claims without the lock are the control: both say that the run is theirs."""
    import multiprocessing

    out = tmp_path / "new" / "run"
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=hold, args=(out, ready, end))
    other.start()
    try:
        assert ready.wait(30)
        with pytest.raises(OutputExistsError, match="another process is working there"), outputs.lock_dir(out):
            pass
        assert outputs.claim(out, "recover", {"a": 1}, False) is False
        assert outputs.claim(out, "recover", {"a": 1}, False) is False
        other.kill()
        other.join()
        with outputs.lock_dir(out):  # a kill frees it
            assert {path.name for path in out.iterdir()} == {LIST, MARK}  # and nothing is left behind
    finally:
        other.kill()
    with outputs.claimed(out, "recover", {"a": 1}, False) as complete:
        assert not complete
        with pytest.raises(OutputExistsError, match="another process"), outputs.claimed(out, "recover", {"a": 1}, True):
            pass
    outputs.complete(out)
    with outputs.claimed(out, "recover", {"a": 1}, False) as complete:
        assert complete
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputExistsError, match="is a file"), outputs.lock_dir(tmp_path / "file"):
        pass


def test_a_part_of_a_run_is_made_again_around_files_of_others(tmp_path):
    """What `--overwrite` of the whole left in the folder of a part; alone, such a folder is refused as mistyped."""
    part = tmp_path / "run" / "part"
    with outputs.claimed(tmp_path / "run", "demo", {}, False):
        part.mkdir()
        (part / "notes.txt").write_text("mine")
        with outputs.claimed(part, "quantize", {}, False) as complete:
            assert not complete
            with pytest.raises(OutputExistsError, match="in the way"):
                ours(part / "notes.txt")
    assert (part / "notes.txt").read_text() == "mine"
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="no qat-lora run made"):
        claim(tmp_path / "alone", "quantize", {}, False)


def test_files_of_a_draft_folder_have_no_lines_of_their_own(tmp_path):
    """Three checkpoints, each written anew: the list names their files and the draft and old folders, once each."""
    out = tmp_path / "run"
    claim(out, "recover", SETTINGS, False)
    try:
        for step in (1, 1, 2):
            with atomic_dir(out / "checkpoints" / f"step-{step}") as draft:
                write_text(draft / "state.json", "{}")
        write_text(out / "result.json", "{}")
    finally:
        release(out)
    files = [f"step-{step}/state.json" for step in (1, 2)]
    folders = [".step-1.new/", ".step-1.old/", ".step-2.new/"]
    assert listed(out)[1] == {f"checkpoints/{name}" for name in files + folders} | {"result.json", ".tmp-result.json"}
    with outputs.claimed(out, "recover", {"seed": 2}, True):
        assert sorted(path.name for path in out.iterdir()) == [LIST, MARK]
