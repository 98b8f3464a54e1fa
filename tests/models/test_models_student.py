"""Whatever a user may name as a model is opened as what it is, or refused with the way out."""

import json
import shutil

import pytest
import torch
from toy_pipeline import cache_options, call, quantize_options, recover_options

from qat_lora.errors import ModelError
from qat_lora.files.checksums import seal
from qat_lora.models.hub import HubConfig
from qat_lora.models.student import adapter_folder, base_folder, open_student


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("students")
    cache = call("build_cache", cache_options(tiny, root / "cache", num_rows=32))
    student = call("quantize", quantize_options(tiny, root / "student", cache))
    plain = call("recover", recover_options(student, cache, root / "plain"))
    scaled = call("recover", recover_options(student, cache, root / "scaled", train_scales=True))
    return {"teacher": tiny.teacher, "student": student, "plain": plain, "scaled": scaled}


def logits(student):
    ids = torch.arange(16)[None]
    with torch.inference_mode():
        return student.model.logits(student.model.hidden(ids, torch.zeros(1, 16, dtype=torch.int32))[0])


def opened(folder):
    return open_student(str(folder), HubConfig())


def test_every_kind_of_folder(made):
    kinds = {name: opened(folder) for name, folder in made.items()}
    kinds["adapter"] = opened(made["plain"] / "best")
    assert kinds["teacher"].bits_per_weight is None
    assert 2.2 < kinds["student"].bits_per_weight < 2.3 < kinds["plain"].bits_per_weight < 4
    assert kinds["plain"].bits_per_weight == kinds["scaled"].bits_per_weight
    assert torch.equal(logits(kinds["plain"]), logits(kinds["adapter"]))  # a run is its best adapter
    assert kinds["plain"].sha256 == kinds["adapter"].sha256
    assert len({kind.sha256 for kind in kinds.values()}) == 4
    assert not any(p.requires_grad for kind in kinds.values() for p in kind.model.module.parameters())
    seen = [logits(kind) for kind in kinds.values()]
    assert not torch.allclose(seen[0], seen[1], atol=1e-3) and not torch.allclose(seen[1], seen[2], atol=1e-4)


def test_best_is_opened_and_not_last(made):
    names = {name: opened(made["scaled"] / name).sha256 for name in ("start", "best", "last")}
    assert opened(made["scaled"]).sha256 == names["best"] and names["start"] != names["last"]


def test_bits_per_weight_by_hand(made):
    """Per block: attention 64x64 and twice 32x64, out 64x64; MLP 3 of 96x64. Down's rows are 96 long: 2 groups."""
    attention = [(64, 64), (32, 64), (32, 64), (64, 64)]
    shapes = [*attention, (96, 64), (96, 64), (64, 96)]
    weights = sum(o * i for o, i in shapes)
    base = sum(2 * o * i + 16 * o * -(-i // 64) for o, i in shapes)
    adapter = sum(16 * 2 * (o + i) for o, i in shapes)
    assert opened(made["student"]).bits_per_weight == pytest.approx(base / weights)
    assert opened(made["plain"]).bits_per_weight == pytest.approx((base + adapter) / weights)


def test_a_run_that_was_moved_with_its_base_still_opens(made, tmp_path):
    shutil.copytree(made["scaled"], tmp_path / "moved")
    config = tmp_path / "moved" / "best" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(made["scaled"]), "/gone/elsewhere"))
    seal(config.parent)
    assert torch.equal(logits(opened(tmp_path / "moved")), logits(opened(made["scaled"])))
    assert base_folder(tmp_path / "moved" / "best") == tmp_path / "moved" / "best" / "base"


def adapter_with_base(made, tmp_path, base):
    shutil.copytree(made["plain"] / "best", tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": base}))
    seal(config.parent)
    return tmp_path / "adapter"


def test_a_base_named_by_a_path_beside_the_adapter(made, tmp_path):
    folder = adapter_with_base(made, tmp_path, "../student")
    shutil.copytree(made["student"], tmp_path / "student")
    assert torch.equal(logits(opened(folder)), logits(opened(made["plain"])))


def test_a_missing_base_is_named_with_the_way_out(made, tmp_path):
    folder = adapter_with_base(made, tmp_path, "/gone/student")
    with pytest.raises(ModelError, match="/gone/student.*put that folder back") as caught:
        opened(folder)
    assert str(folder / "base") in str(caught.value) and "\n" not in str(caught.value)
    shutil.copytree(made["student"], folder / "base")  # as the message says
    assert torch.equal(logits(opened(folder)), logits(opened(made["plain"])))


def test_another_base_is_refused(made, tmp_path):
    with pytest.raises(ModelError, match="another base"):
        opened(adapter_with_base(made, tmp_path, str(made["scaled"] / "last" / "base")))


def test_a_cut_adapter_is_refused(made, tmp_path):
    folder = adapter_with_base(made, tmp_path, str(made["student"]))
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: is not what was written"):
        opened(folder)
    seal(folder)
    with pytest.raises(ModelError, match="incomplete or damaged"):
        opened(folder)


def test_adapter_folder(made):
    assert adapter_folder(str(made["teacher"])) is None and adapter_folder("/nowhere") is None
    assert adapter_folder(str(made["plain"])) == made["plain"] / "best"
    assert adapter_folder(str(made["plain"] / "last")) == made["plain"] / "last"
