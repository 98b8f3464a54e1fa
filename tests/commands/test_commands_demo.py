"""The demo at toy size: same code, a few files of the library, a handful of steps."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from qat_lora.commands import demo as demo_module
from qat_lora.errors import OutputExistsError, TextError
from qat_lora.options import DemoOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run

TOY = {
    "VOCABULARY": 300,
    "HELD_OUT_FILES": 3,
    "TEACHER_STEPS": 6,
    "TEACHER_ROWS": 4,
    "CACHE_ROWS": 32,
    "TOP_K": 16,
    "RECOVERY_STEPS": 6,
    "RECOVERY_ROWS": 4,
    "RANK": 4,
    "EVAL_ROWS": 8,
}


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Shrink the demo, and give it a library of thirty-some small files."""
    library = tmp_path / "library"
    library.mkdir()
    real = Path(sysconfig.get_path("stdlib"))
    for file in sorted(real.glob("*.py"), key=lambda f: f.stat().st_size)[20:56]:
        shutil.copy(file, library)
    for name, value in TOY.items():
        monkeypatch.setattr(demo_module, name, value)
    monkeypatch.setattr(demo_module.sysconfig, "get_path", lambda _: str(library))
    return tmp_path / "out"


def options(out: Path, **settings) -> DemoOptions:
    return DemoOptions(run=RunConfig(out=str(out), device="cpu", quiet=True, **settings))


def test_demo_reports_all_models_and_reuses_what_is_complete(toy, capsys):
    report = run(COMMANDS["demo"], options(toy))
    assert report == json.loads((toy / "report.json").read_text())
    assert set(report) == {
        *("teacher", "quantised", "calibrated", "recovered"),
        *("gap_recovered_log", "kl_recovered", "seconds"),
    }
    for name in ("quantised", "calibrated", "recovered"):
        assert {"ppl", "nll", "kl", "top1", "bits_per_weight"} <= set(report[name])
    assert report["quantised"]["bits_per_weight"] == 2.25
    assert report["recovered"]["kl"] < report["quantised"]["kl"]
    shown = capsys.readouterr().out
    assert "gap recovered (log perplexity)" in shown and "--- recovered" in shown
    assert (toy / "report.png").stat().st_size > 10_000
    assert "![scores and training curve](report.png)" in (toy / "report.md").read_text()

    held_out = set((toy / "held-out.txt").read_text().split())
    assert len(held_out) == 3 and not held_out & set((toy / "trained-on.txt").read_text().split())

    before = {file: file.stat().st_mtime_ns for file in toy.rglob("*") if file.is_file()}
    assert run(COMMANDS["demo"], options(toy)) == report
    assert {file: file.stat().st_mtime_ns for file in toy.rglob("*") if file.is_file()} == before

    with pytest.raises(OutputExistsError, match="seed was 0, now 1"):
        run(COMMANDS["demo"], options(toy, seed=1))


def test_an_interrupted_demo_goes_on_where_it_stopped(toy, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(demo_module, "recover", fail)
        with pytest.raises(KeyboardInterrupt):
            run(COMMANDS["demo"], options(toy))
    teacher = (toy / "teacher" / "model.safetensors").stat().st_mtime_ns
    run(COMMANDS["demo"], options(toy))
    assert (toy / "teacher" / "model.safetensors").stat().st_mtime_ns == teacher


def test_a_python_without_sources_is_refused(toy, monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(demo_module.sysconfig, "get_path", lambda _: str(tmp_path / "empty"))
    with pytest.raises(TextError, match="run the demo with a full Python"):
        run(COMMANDS["demo"], options(toy))


def test_muon_is_torchs_in_bfloat16_and_orthogonalises_in_float32():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(*shape)) for shape in ((24, 40), (40, 24))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 1e-2, "weight_decay": 0.01}
    muon = demo_module.Muon(ours, dtype=torch.bfloat16, **settings)
    reference = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        muon.step()
        reference.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    update = demo_module._nearly_orthogonal(torch.randn(24, 40))
    assert update.dtype == torch.float32
    assert 0.5 < torch.linalg.svdvals(update).min() <= torch.linalg.svdvals(update).max() < 1.5
