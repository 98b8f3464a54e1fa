"""The line that says what comes next: understood by the parser, with the names of the run, only where it is wanted."""

import shlex

import pytest

from qat_lora import cli
from qat_lora.plan.advice import next_command


def printed(line: str, capfd) -> list[str]:
    """Run a command on the CPU; return the lines that it prints."""
    capfd.readouterr()
    cli.main([*shlex.split(line), "--device", "cpu"])
    return capfd.readouterr().out.splitlines()


def test_a_day_from_cache_to_export(tiny, tmp_path, monkeypatch, capfd):
    """Each command's last line is the next command; a run begins with at most eight lines."""
    monkeypatch.chdir(tmp_path)
    build = f"cache build --teacher {tiny.teacher} --dataset {tiny.text} --length 32 --top-k 8 --eval-rows 2 --out c"
    line = printed(build, capfd)[-1]
    assert line == f"next: qat-lora quantize --model {tiny.teacher} --kd-cache-dir c"
    line = printed(line.removeprefix("next: qat-lora ") + " --init mse --out q", capfd)[-1]
    assert line == "next: qat-lora recover --checkpoint q --kd-cache-dir c"
    train = line.removeprefix("next: qat-lora ") + " --max-steps 2 --lr 1e-4 --out r"
    lines = printed(train, capfd)
    assert len(lines) <= 8 and lines[-2].startswith("2 steps, best adapter (step ")
    start, wikitext = f"next: qat-lora eval --teacher {tiny.teacher} --students r ", "--dataset Salesforce/wikitext"
    assert lines[-1].startswith(start + wikitext) and lines[-1].endswith(" --split test --format wikitext")
    assert printed(train, capfd)[-2:] == ["r is complete already", lines[-1]]
    words = lines[-1].removeprefix("next: qat-lora ").partition("--dataset")[0]
    line = printed(f"{words} --dataset {tiny.held_out} --length 32 --eval-rows 2 --out e", capfd)[-1]
    assert line == "next: qat-lora export --student r --scores e"
    line = printed(line.removeprefix("next: qat-lora ") + " --out x", capfd)[-1]
    assert line == "next: qat-lora push x OWNER/NAME --dry-run"
    again = printed(f"{words.replace(' r ', ' x ')} --dataset {tiny.held_out} --length 32 --eval-rows 2 --out f", capfd)
    assert again[-1] == line  # an export is not exported once more


@pytest.mark.parametrize("flag", ["--quiet", "--json", "--dry-run"])
def test_nothing_is_said_where_it_is_not_wanted(flag, tiny, tmp_path, capfd):
    lines = printed(f"quantize --model {tiny.teacher} --init mse --out {tmp_path / 'q'} {flag}", capfd)
    assert not any("next:" in line for line in lines)


def test_names_with_blanks_are_quoted_and_text_alone_has_no_teacher(tiny, tmp_path):
    from qat_lora.data.sources import TextConfig
    from qat_lora.options import QuantizeOptions, RecoverOptions

    text = TextConfig(dataset="my notes")
    line = next_command("quantize", QuantizeOptions(model="m", text=text), tmp_path)
    assert line == "qat-lora cache build --teacher m --dataset 'my notes'"
    options = RecoverOptions(checkpoint="q", learn="ce", text=text)
    assert next_command("recover", options, tmp_path) == f"qat-lora export --student {tmp_path}"
    assert next_command("smoke", options, {}) is None
