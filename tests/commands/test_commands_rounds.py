"""`rounds`: one run of `recover` and the student's own texts, the same after a kill in every phase."""

import json

import pytest
from toy_pipeline import cache_and_student, call, part, recover_options

from qat_lora import cli
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.commands import cache_generate, rounds
from qat_lora.errors import ConfigError, FailedError
from qat_lora.options import RoundsOptions
from qat_lora.train import callbacks
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig, lr_factor

STEPS, BATCH = 9, 8
RECOVER = f"batch_size={BATCH} recovery_r=2 lr=2e-3 scale_lr=2e-3 warmup_steps=2 save_steps=2 log_steps=1 eval_steps=3"
GENERATE = "max_new_tokens=12 write_batch_size=8 teacher_batch_size=4"


class Killed(BaseException):
    """Ends a phase where a kill would."""


class Here:
    """A process of a phase that is this one."""

    pid = None

    def __init__(self, words, stdout):
        self.words = words[3:]

    def wait(self):
        try:
            cli.main(self.words)
        except SystemExit as error:
            return int(error.code or 0)
        return 0


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("rounds")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"text": f"the model {i}"}) + "\n" for i in range(40)))
    return root, *cache_and_student(tiny, root)


@pytest.fixture
def run(made, monkeypatch):
    root, cache, student = made
    monkeypatch.setattr(rounds.subprocess, "Popen", Here)

    def run(out, **changed):
        given = {
            "rounds": 2,
            "round_texts": 16,
            "max_steps": STEPS,
            "recover": RECOVER,
            "generate": GENERATE,
            **changed,
        }
        names = {"checkpoint": str(student), "kd_cache_dir": str(cache), "dataset": str(root / "prompts.jsonl")}
        return call("rounds", RoundsOptions(**names, **given, run=part(out, seed=3)))

    return run


def content(out):
    """What a run leaves, but for its times."""
    files = [
        file for file in out.rglob("*") if file.suffix in (".safetensors", ".jsonl") or file.name == "manifest.json"
    ]
    found = {file.relative_to(out).as_posix(): file.read_bytes() for file in files if file.name != "metrics.jsonl"}
    return found, [(line["step"], line["loss"], line["lr"]) for line in metrics(out / "run")]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_killed_in_every_phase_it_leaves_the_same(made, run, tmp_path, monkeypatch, capfd):
    done = run(tmp_path / "whole" / "x")
    whole = content(tmp_path / "whole" / "x")
    assert done == tmp_path / "whole/x/run" and len(whole[1]) == STEPS
    monkeypatch.chdir(tmp_path)
    killed = []

    def dies(module, name, event, after):
        real = getattr(module, name)

        def work(*given, **more):
            kind = f"{name} {event(*given)}"
            result = real(*given, **more) if after or kind in killed else None
            if kind not in killed:
                killed.append(kind)
                raise Killed
            return result

        monkeypatch.setattr(module, name, work)

    dies(callbacks, "save_checkpoint", lambda folder, step, *_: step, after=True)
    dies(cache_generate, "write_text", lambda file, _: f"{file.parent.name}/{file.name}", after=False)
    dies(cache_generate, "build_cache", lambda options, _: options.run.out, after=False)
    for _ in range(30):
        try:
            run(tmp_path / "killed" / "x")
            break
        except Killed:
            pass
    found = content(tmp_path / "killed" / "x")
    assert [kind.split()[0] for kind in killed].count("save_checkpoint") == 6  # steps 2, 3, 4, 6, 8, 9
    assert len(killed) == 6 + 2 * 3 and found[1] == whole[1]
    differing = {name for name in whole[0].keys() | found[0].keys() if whole[0].get(name) != found[0].get(name)}
    assert {name for name in differing if "checkpoints" not in name} == set()


def test_all_rounds_are_one_run(made, run, tmp_path):
    root, cache, student = made
    out = run(tmp_path / "rounds", later_share=0.5)
    config = OptimConfig(lr=2e-3, scale_lr=2e-3, warmup_steps=2)
    lines = metrics(out)
    assert [line["lr"] for line in lines] == pytest.approx([2e-3 * lr_factor(config, i, STEPS) for i in range(STEPS)])
    loop = LoopConfig(batch_size=BATCH, max_steps=STEPS, log_steps=1, save_steps=2, eval_steps=3)
    alone = call(
        "recover",
        recover_options(
            student, cache, tmp_path / "alone", train=config, loop=loop, run=part(tmp_path / "alone", seed=3)
        ),
    )
    plain = metrics(alone)
    same = [a["loss"] == b["loss"] for a, b in zip(lines, plain, strict=True)]
    assert same == [True] * 3 + [False] * 6  # what no later cache has touched is the run without
    for number in (1, 2):
        held = KDCacheDataset(str(tmp_path / "rounds" / f"round-{number}")).fingerprint
        assert held.contents == KDCacheDataset(str(cache)).fingerprint.contents
    texts = [(tmp_path / "rounds" / f"round-{n}_texts/000000000.jsonl").read_text() for n in (1, 2)]
    assert texts[0] != texts[1]


def test_a_phase_that_fails_ends_it(made, run, tmp_path, capfd):
    with pytest.raises(FailedError, match="rounds: recover ended with exit code 2; the same command goes on"):
        run(tmp_path / "x", recover="no_such=1")
    assert "no_such" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="dataset: missing"):
        RoundsOptions(checkpoint="a", kd_cache_dir="b")
