"""Settings: one declaration, strict filling from recipe, flags and words, and a fingerprint that does not move."""

import hashlib
import typing
from dataclasses import dataclass
from typing import Literal

import pytest
import yaml

from qat_lora.config import (
    fingerprint,
    from_dict,
    leaves,
    load_yaml,
    option,
    resolve,
    save_yaml,
    setting_path,
    settings,
    to_dict,
)
from qat_lora.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    lr: float = option(3e-4, "rate")
    steps: int = option(10, "steps", unit="steps", alias="max_steps")


@dataclass(frozen=True)
class Outer:
    name: str | None = option(None, "a name")
    rows: int | None = option(None, "rows", unit="rows", below=2**64)
    kind: Literal["a", "b"] = option("a", "kind")
    on: bool = option(False, "switch")
    many: tuple[float, ...] = option((1.0,), "list")
    words: tuple[str, ...] = option((), "list")
    train: Inner = option(Inner, "inner")


def recipe(tmp_path, text):
    file = tmp_path / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_words_win_over_flags_win_over_the_recipe_win_over_defaults(tmp_path):
    file = recipe(tmp_path, "name: recipe\ntrain:\n  lr: 3e-5\n  steps: 3\n")
    assert resolve(Outer) == Outer()
    assert resolve(Outer, recipe=file) == Outer(name="recipe", train=Inner(3e-5, 3))
    flags = {("train", "lr"): "1e-2", ("train", "steps"): "4"}
    assert resolve(Outer, recipe=file, flags=flags).train == Inner(1e-2, 4)
    assert resolve(Outer, recipe=file, flags=flags, words=["train.lr=0.5"]).train == Inner(0.5, 4)


@pytest.mark.parametrize("word", ["train.steps=7", "steps=7", "max_steps=7"])
def test_a_word_names_a_setting_by_path_name_or_alias(word):
    assert resolve(Outer, words=[word]).train.steps == 7


def test_a_recipe_may_be_flat_nested_or_both(tmp_path):
    assert resolve(Outer, recipe=recipe(tmp_path, "max_steps: 5\ntrain:\n  lr: 1\n")).train == Inner(1.0, 5)
    assert resolve(Outer, recipe=recipe(tmp_path, "train.steps: 5\ntrain:\n")).train.steps == 5
    assert resolve(Outer, recipe=recipe(tmp_path, "# nothing\n")) == Outer()


@pytest.mark.parametrize(
    ("word", "path", "expected"),
    [
        ("rows=1e3", ("rows",), 1000),
        ("rows=12345678901234567891", ("rows",), 12345678901234567891),  # floats would round it
        ("rows=none", ("rows",), None),
        ("on=yes", ("on",), True),
        ("on=0", ("on",), False),
        ("many=1,2.5", ("many",), (1.0, 2.5)),
        ("many=", ("many",), ()),
        ("words=x, y", ("words",), ("x", "y")),
        ("name=12", ("name",), "12"),
        ("name=a=b", ("name",), "a=b"),
        ("lr=-1", ("train", "lr"), -1.0),
    ],
)
def test_values_take_the_declared_type(word, path, expected):
    value = resolve(Outer, words=[word])
    for part in path:
        value = getattr(value, part)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("rows=1.5", "rows: '1.5' is not a whole number"),
        ("rows=many", "rows: 'many' is not a whole number"),
        ("rows=1e400", "rows: '1e400' is not a whole number"),
        ("lr=nan", "train.lr: 'nan' is not a finite number"),
        ("lr=inf", "train.lr: 'inf' is not a finite number"),
        ("lr=", "train.lr: '' is not a finite number"),
        ("lr=none", "train.lr: 'none' is not a finite number"),
        ("kind=c", "kind: 'c' is unknown; allowed: a, b"),
        ("on=maybe", "on: 'maybe' is not a switch; allowed: true, false"),
        ("nmae=x", "nmae: no such setting; the nearest: name, "),
        ("train=x", "train: no such setting"),
        ("x", "'x': expected a setting as name=value, for example train.lr=3e-4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(word, says):
    with pytest.raises(ConfigError) as caught:
        resolve(Outer, words=[word])
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: 3\n", "train is a group of settings"),
        ("train: [1]\n", "train is a group of settings"),
        ("train:\n  nope: 3\n", "train.nope: no such setting"),
        ("nope: 3\n", "nope: no such setting"),
        ("- 1\n", "expected `name: value` lines"),
        ("a: b: c\n", "is not valid YAML"),
        ("name: [a]\n", "is not a text"),
        ("rows: true\n", "rows: True is not a whole number"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(text, says, tmp_path):
    with pytest.raises(ConfigError) as caught:
        resolve(Outer, recipe=recipe(tmp_path, text), flags={("train", "lr"): "1"})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_unreadable_recipe_is_refused(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for file, says in [
        (tmp_path / "none.yaml", "cannot be read"),
        (tmp_path, "cannot be read"),
        (binary, "is not UTF-8 text"),
    ]:
        with pytest.raises(ConfigError, match=says):
            load_yaml(file)


def test_yaml_round_trip(tmp_path):
    config = Outer(name="x", many=(1.0, 2.0), train=Inner(steps=3))
    save_yaml(config, tmp_path / "config.yaml")
    assert resolve(Outer, recipe=tmp_path / "config.yaml") == config
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["train"] == {"lr": 3e-4, "steps": 3}
    assert from_dict(Outer, to_dict(config)) == config


def test_leaves_are_every_setting_in_order():
    assert [".".join(leaf.path) for leaf in leaves(Outer)] == [
        *("name", "rows", "kind", "on", "many", "words"),
        *("train.lr", "train.steps"),
    ]
    assert setting_path(Outer, "max_steps") == ("train", "steps")


def test_a_name_that_two_settings_have_must_be_given_in_full():
    @dataclass(frozen=True)
    class Two:
        one: Inner = option(Inner, "one")
        two: Inner = option(Inner, "two")

    with pytest.raises(ConfigError, match="lr: means one.lr, two.lr; name one in full"):
        setting_path(Two, "lr")
    assert setting_path(Two, "two.lr") == ("two", "lr")


@settings
class Bounded:
    rows: int | None = option(4, "rows", min=2)
    share: float = option(0.5, "share", above=0, max=1)
    chance: float = option(0.5, "chance", min=0, below=1)
    plain: float = option(0.0, "any")

    def __post_init__(self):
        if self.rows == 7:
            raise ConfigError("rows: 7 is taken")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rows": 1}, "rows: 1 is too small; allowed: 2 or more"),
        ({"rows": 2**31}, "rows: 2147483648 is too large; allowed: whole numbers below 2^31"),
        ({"rows": 7}, "rows: 7 is taken"),
        ({"share": 0}, "share: 0 is not allowed; give a number above 0 and at most 1"),
        ({"share": 1.1}, "share: 1.1 is not allowed; give a number above 0 and at most 1"),
        ({"share": float("nan")}, "share: nan is not allowed"),
        ({"chance": 1.0}, "chance: 1.0 is not allowed; give a number 0 or more and below 1"),
        ({"plain": float("inf")}, "plain: inf is too small"),
    ],
)
def test_a_field_declares_its_bounds(given, says):
    assert Bounded(rows=None, share=1).rows is None
    with pytest.raises(ConfigError) as caught:
        Bounded(**given)
    assert str(caught.value).startswith(says)


@dataclass(frozen=True)
class Record:
    name: str | None
    sizes: tuple[float, ...]
    parts: tuple[Inner, ...]
    notes: dict[str, typing.Any]


def test_exact_records_are_not_converted():
    tree = {"name": None, "sizes": [1, 2.5], "parts": [{"lr": 1.0, "steps": 2}], "notes": {"a": [1]}}
    assert from_dict(Record, tree, exact=True) == Record(None, (1.0, 2.5), (Inner(1.0, 2),), {"a": [1]})
    part = tree["parts"][0]
    for changed, says in [
        ({"name": 3}, "Record.name: 3 is not a str"),
        ({"sizes": 1.0}, "Record.sizes: 1.0 is not a list"),
        ({"sizes": ["1"]}, "Record.sizes: '1' is not a float"),
        ({"parts": [part | {"steps": -1}]}, "Record.parts.steps: -1 is not a whole number"),
        ({"parts": [part | {"steps": True}]}, "Record.parts.steps: True is not a whole number"),
        ({"parts": [{"lr": 1.0}]}, "Record.parts: keys that should not be there, or are missing: 'steps'"),
        ({"parts": [1]}, "Record.parts: expected an object"),
        ({"more": 1}, "Record: keys that should not be there, or are missing: 'more'"),
        ({"notes": []}, "Record.notes: [] is not a dict"),
    ]:
        with pytest.raises(ConfigError) as caught:
            from_dict(Record, tree | changed, "Record", exact=True)
        assert str(caught.value).startswith(says)


def test_the_fingerprint_is_the_sha256_of_canonical_json():
    expected = hashlib.sha256(b'{"lr":0.5,"steps":2}').hexdigest()
    assert fingerprint(Inner(0.5, 2)) == expected == fingerprint({"steps": 2, "lr": 0.5})
    assert fingerprint(Inner(0.5, 3)) != expected
    with pytest.raises(ValueError, match="JSON"):
        fingerprint({"lr": float("nan")})


LEVELS = "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9))
MERGES = "".join(f"{chr(98 + i)}: &{chr(98 + i)}\n  <<: [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a [x, x, x]\n" + LEVELS, "an alias; write the value out"),
        ("a: &a {x: 1}\n" + MERGES, "an alias; write the value out"),
        ("a: &a [*a]", "an alias; write the value out"),
        ("many: [" + "1, " * 10_000 + "]", "more than 10,000 values"),
        ("name: " + "[" * 50_000, "nested more than 20 deep"),
        ("".join(" " * i + "a:\n" for i in range(500)), "nested more than 20 deep"),
        ("rows: " + "9" * 5000, "integer string conversion"),
        ("rows: 0x" + "f" * 5000, "integer string conversion"),
        ("name: 2001-99-99", "month must be in 1..12"),
        ("name: !!int ''", "is not valid YAML"),
        ("name: !!bool x", "is not valid YAML"),
        ("name: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("name: '" + "x" * 2**20 + "'", "larger than 1,048,576 bytes"),
    ],
)
def test_yaml_of_others_is_bounded(tmp_path, text, says):
    """Every one of these was a traceback, or a process that needed all memory there is."""
    with pytest.raises(ConfigError) as caught:
        resolve(Outer, recipe=recipe(tmp_path, text))
    assert says in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def commands():
    import qat_lora.options as options

    return [cls for name, cls in vars(options).items() if name.endswith("Options")]


@pytest.mark.parametrize("cls", commands())
def test_no_count_is_beyond_what_a_machine_can_hold(cls):
    """As `--num-rows 10**20` and `--teacher-batch-size 2**62`, which overflowed somewhere in a run."""
    for leaf in leaves(cls):
        if int in (leaf.type, *typing.get_args(leaf.type)):
            for value in (10**20, str(-(2**64)), "9" * 5000):
                with pytest.raises(ConfigError, match=rf"{leaf.name}: .*(too large|not a whole number)") as caught:
                    resolve(cls, flags={leaf.path: value})
                assert len(str(caught.value)) < 1000


def test_messages_are_one_line_that_can_be_printed():
    error = ConfigError("a\nb\x1b[31m\udcff · " + "x" * 5000)
    assert str(error).startswith("a b\\x1b[31m\\udcff · xxx") and len(str(error)) < 1000 and str(error).isprintable()
