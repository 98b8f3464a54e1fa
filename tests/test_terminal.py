"""Output on terminals that know no "·" and no file names that are not text."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora import cli
from qat_lora.options import RunConfig
from qat_lora.setup.common import say
from qat_lora.terminal import any_text

LINE = "cpu · float32 · runs/gr\u00f6\u00dfe\udcff"


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", b"cpu ? float32 ? runs/gr??e?\n"),
        ("latin-1", "cpu · float32 · runs/größe?\n".encode("latin-1")),
        ("utf-8", "cpu · float32 · runs/größe\\udcff\n".encode()),
    ],
)
def test_a_status_line_on_any_encoding(monkeypatch, encoding, printed):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(UnicodeEncodeError):
        say(RunConfig(), LINE)  # positive control
    with any_text():
        say(RunConfig(), LINE)
        assert stream.errors != "strict"
    assert stream.errors == "strict" and stream.buffer.getvalue() == printed


def test_closed_and_absent_streams_are_left_alone(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)
    with any_text():
        stream.close()


def test_a_command_on_an_ascii_terminal(monkeypatch, tiny, tmp_path):
    """A status line with "·", a bar, and a folder whose name is not text."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"))
    out = f"{tmp_path}/gr\u00f6\u00dfe\udcff"
    line = f"cache build --teacher {tiny.teacher} --dataset {tiny.text} --length 32 --top-k 8 --num-rows 8 --device cpu"
    cli.main([*line.split(), "--out", out])
    stream.flush()
    assert b" ? float32 ? cache in " in stream.buffer.getvalue() and Path(out, "manifest.json").is_file()
    with pytest.raises(SystemExit) as caught:
        cli.main(["recover", "--recipe", f"{out}/none.yaml"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("info", {"PYTHONIOENCODING": "ascii"}),
        ("verify", {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}),
    ],
)
def test_a_folder_whose_name_is_not_utf8(words, variables, tmp_path):
    folder = os.fsencode(tmp_path) + b"/gr\xf6\xdfe \xe2\x80\xa6"
    shutil.copytree(os.fsencode(Path(__file__).parent / "data" / "golden_cache" / "short"), folder)
    command = [sys.executable, "-c", "from qat_lora.cli import main; main()", "cache", words, folder]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True)
    assert done.returncode == 0 and done.stdout and b"Traceback" not in done.stderr, done.stderr
