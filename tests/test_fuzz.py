"""Every parser of other people's files, given damaged and hostile ones (`fuzzing.py`): read, or refused in one line.

A fuzzer that finds nothing may be blind. So it is also turned on readers as one first writes them, and has to find
what is wrong with each; and on every way in which it can notice a fault.
"""

import json
import re

import fuzzing
import pytest
import yaml

from qat_lora import config
from qat_lora.config import resolve
from qat_lora.errors import ConfigError
from qat_lora.layers.lora import LoraConfig
from qat_lora.models import student as students
from qat_lora.models.adapter import CONFIG, NOTE, AdapterInfo
from qat_lora.options import RecoverOptions


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return fuzzing.targets(tmp_path_factory.mktemp("fuzz").resolve())


def faults(found):
    return {name: of.faults for name, of in found.items() if of.faults}


def test_every_parser_reads_its_valid_file(targets):
    """As it was written, and as cases are written: else a fuzzer would only ever test the first line of a parser."""
    for name, target in targets.items():
        valid = target.file.read_bytes()
        for data in (valid, target.form.render(target.form.parse(valid))):
            target.file.write_bytes(data)
            assert fuzzing.outcome(target.read, target.file.parent) == "read", name
        target.file.write_bytes(valid)


@pytest.mark.parametrize(
    ("cases", "seed"), [(450, None), *(pytest.param(2500, seed, marks=pytest.mark.slow) for seed in range(4))]
)
def test_files_of_others_are_read_or_refused_in_one_line(targets, cases, seed):
    shares = fuzzing.shared_out(targets.values(), cases)
    found = {name: fuzzing.survey(targets[name], share, seed) for name, share in zip(targets, shares, strict=True)}
    assert faults(found) == {}
    assert sum(of.cases for of in found.values()) > 0.8 * cases
    assert sum(of.read for of in found.values()) > 0.05 * cases  # changes that do no harm do none
    assert sum(of.refused for of in found.values()) > 0.3 * cases


@pytest.mark.parametrize(("cases", "seed"), [(100, None), pytest.param(2000, 0, marks=pytest.mark.slow)])
def test_command_lines_resolve_or_are_refused_in_one_line(cases, seed):
    found = fuzzing.survey_command_lines(cases, seed)
    assert found.faults == {} and found.read > 0 and found.refused > 0


# Readers as one first writes them.


def test_it_finds_a_recipe_reader_that_takes_aliases(targets, monkeypatch):
    monkeypatch.setattr(config, "_BoundedLoader", yaml.SafeLoader)
    found = fuzzing.survey(targets["recipe"], 300, until_found=True)
    assert "Endless" in "".join(found.faults)


def test_it_finds_a_manifest_reader_that_trusts_a_count(targets, monkeypatch):
    real = config._exact
    monkeypatch.setattr(config, "_exact", lambda value, hint, at: value if hint is int else real(value, hint, at))
    assert fuzzing.survey(targets["cache manifest"], 600, until_found=True).faults


def test_it_finds_an_adapter_reader_that_checks_nothing(targets, monkeypatch):
    def naive(folder):
        settings, note = (json.loads((folder / name).read_text()) for name in (CONFIG, NOTE))
        targets = "|".join(map(re.escape, settings["target_modules"]))
        lora = LoraConfig(int(settings["r"]), float(settings["lora_alpha"]), targets)
        return AdapterInfo(folder, settings["base_model_name_or_path"], note["base_sha256"], lora)

    for module in (fuzzing, students.adapters):
        monkeypatch.setattr(module, "read_adapter", naive)
    assert fuzzing.survey(targets[CONFIG], 100, until_found=True).faults
    assert fuzzing.survey(targets[NOTE], 100, until_found=True).faults


def test_it_finds_a_command_line_whose_numbers_are_not_bounded(monkeypatch):
    monkeypatch.setattr(config, "_number", int)
    assert fuzzing.survey_command_lines(100).faults


# Ways to notice.


def _loop():
    while True:
        len("")


@pytest.mark.parametrize(
    ("read", "noticed"),
    [
        (lambda: None, "read"),
        (lambda: resolve(RecoverOptions), "refused"),
        (lambda: [][0], "IndexError in test_fuzz.py:<lambda>"),
        (_loop, "Endless in test_fuzz.py:_loop"),
    ],
)
def test_what_is_noticed(read, noticed, tmp_path):
    assert fuzzing.outcome(read, tmp_path) == noticed


def test_an_empty_message_and_a_file_outside_are_noticed(tmp_path):
    def empty():
        raise ConfigError("")

    inside, outside = tmp_path / "in" / "a", tmp_path / "out"
    inside.parent.mkdir()
    assert fuzzing.outcome(empty, tmp_path) == "message of ConfigError: empty"
    assert fuzzing.outcome(lambda: inside.write_text("x"), inside.parent) == "read"
    assert fuzzing.outcome(lambda: outside.write_text("x"), inside.parent) == f"written outside: {outside}"
    assert fuzzing.outcome(lambda: inside.rename(outside), inside.parent) == "read"
    assert fuzzing.outcome(lambda: outside.unlink(), inside.parent) == f"written outside: {outside}"
