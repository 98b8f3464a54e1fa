"""Output on terminals that know no "·" and no file names that are not text."""

import contextlib
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from qat_lora import cli
from qat_lora.options import RunConfig
from qat_lora.setup.common import say
from qat_lora.terminal import any_text, highlight

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


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colour_on_terminals_that_show_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert highlight("error:", Terminal(), fg="red") == "\x1b[31merror:\x1b[0m"
    assert highlight("x", io.StringIO(), bold=True) == highlight("x", None, bold=True) == "x"
    monkeypatch.setenv("TERM", "dumb")
    assert highlight("x", Terminal(), bold=True) == "x"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert highlight("x", Terminal(), bold=True) == "x"


BAR = """
import time
from qat_lora.terminal import bars_by_terminal
bars_by_terminal()
from tqdm import tqdm
for _ in tqdm(range(20), desc="a description that is long"):
    time.sleep(0.02)
"""


def lines_drawn(stderr: int, **variables: str) -> subprocess.Popen:
    environment = {**{name: value for name, value in os.environ.items() if "TQDM" not in name}, **variables}
    return subprocess.Popen([sys.executable, "-c", BAR], stderr=stderr, env=environment)


def test_a_bar_is_rare_in_a_file_and_the_users_variables_win(tmp_path):
    counts = []
    for variables in ({}, {"TQDM_MININTERVAL": "0.01"}):
        with (tmp_path / "log").open("w+b") as file:
            assert lines_drawn(file.fileno(), **variables).wait() == 0
            file.seek(0)
            counts.append(file.read().count(b"/20"))
    assert counts[0] <= 3 and counts[1] > 8, counts


def test_a_bar_fits_a_narrow_terminal():
    main, side = pty.openpty()
    termios.tcsetwinsize(side, (24, 40))
    program = lines_drawn(side)
    os.close(side)
    written = b""
    with contextlib.suppress(OSError):  # Linux says so at the end
        while part := os.read(main, 1 << 16):
            written += part
    os.close(main)
    shown = re.split(r"[\r\n]", written.decode())
    assert program.wait() == 0 and len(shown) > 3 and max(map(len, shown)) <= 40


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
