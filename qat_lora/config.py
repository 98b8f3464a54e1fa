"""Settings: frozen dataclasses, filled strictly from a recipe, flags and `key=value` words.

A setting is declared once, with its bounds, as a field `option(default, help)` of a `@settings` class next to the code
that it steers. The command line, the YAML recipes, the `config.yaml` of a run and the fingerprint are all read off that
declaration. Structured-config libraries add a type language of their own; a plain dataclass needs none.

Precedence: `key=value` words over flags over the recipe over the defaults.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from qat_lora.errors import ConfigError
from qat_lora.files.folders import write_text
from qat_lora.terminal import redact

C = TypeVar("C")
Way = tuple[str, ...]  # from the root of the settings to one

INT_LIMIT = 2**31  # whole numbers are below: rows and steps beyond it fit no machine, and overflow where they are used
YAML_LIMIT_BYTES = 1 << 20
YAML_LIMIT_VALUES = 10_000
YAML_LIMIT_DEPTH = 20
_TEXTS = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text("utf-8"))
HELP: dict[str, str] = _TEXTS["help"]  # of settings, where it would take more than a line
OTHER_NAMES: dict[str, list[str]] = _TEXTS["names"]  # what other tools and the predecessor call our settings

_METADATA: dict[str, Any] = {"common": False, "unit": None, "alias": None, "on": None, "required": False, "without": ()}
_METADATA |= {"below": INT_LIMIT, "min": -math.inf, "above": -math.inf, "max": math.inf}


def option(default: Any, help: str, **given: Any) -> Any:
    """Declare a setting: its default (of a group: its class), one line of help; `given` are of `_METADATA`.

    `--help` of a command with many settings shows the `common` ones. `alias` is a second name. `on` is what `true`
    means for a number; `false` is then 0. A `required` one has no default. `without` are, of a group, the settings (or
    groups, or dotted paths) that its owner does not use: they get no flag and no line in a `config.yaml`, and are
    refused, since a setting without effect misleads. A number may be `min` or `max`, but not `above` or `below`.
    """
    if unknown := given.keys() - _METADATA:
        raise TypeError(f"a setting has no {', '.join(unknown)}")
    metadata = _METADATA | given
    metadata["help"] = help + " (required)" * metadata["required"]
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


common = functools.partial(option, common=True)


def required(config: object, name: str) -> None:
    """Raise ConfigError where a setting that has no default is missing."""
    if getattr(config, name) is None:
        raise ConfigError(f"{name}: missing; give --{name.replace('_', '-')}")


@typing.dataclass_transform(frozen_default=True)
def settings(cls: type[C]) -> type[C]:
    """Make a class one of settings: a frozen dataclass that refuses numbers outside the bounds of their options."""
    more = getattr(cls, "__post_init__", None)

    def check(self: Any) -> None:
        for field in dataclasses.fields(self):
            value, bounds = getattr(self, field.name), field.metadata
            if "below" in bounds and isinstance(value, int | float):  # a setting that is None passes
                most = bounds["below"] if bounds["below"] < INT_LIMIT else math.inf
                if not (bounds["min"] <= value <= bounds["max"] and bounds["above"] < value < most):
                    raise ConfigError(f"{field.name}: {value} {_refusal(bounds)}")
                _refuse_large(field, value, field.name)
        for field in dataclasses.fields(self):
            if field.metadata.get("required"):
                required(self, field.name)
        if more is not None:
            more(self)

    cls.__post_init__ = check  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def _refusal(bounds: Mapping[str, Any]) -> str:
    """Return what an error says of a number outside its bounds."""
    least = f"above {bounds['above']}" if bounds["above"] > -math.inf else f"{bounds['min']} or more"
    most = f" and at most {bounds['max']}" * (bounds["max"] < math.inf)
    most += f" and below {bounds['below']}" * (bounds["below"] < INT_LIMIT)
    if most or bounds["above"] > -math.inf:
        return f"is not allowed; give a number {least}{most}"
    return f"is too small; allowed: {least}"


def _refuse_large(field: dataclasses.Field[Any], value: Any, where: str) -> None:
    below = field.metadata.get("below", INT_LIMIT)
    if isinstance(value, int) and abs(value) >= below:
        raise ConfigError(f"{where}: {value} is too large; allowed: whole numbers below 2^{below.bit_length() - 1}")


class Leaf(typing.NamedTuple):
    """One setting of a config class, nested ones included."""

    path: tuple[str, ...]
    type: Any
    field: dataclasses.Field[Any]
    used: bool  # False where the owner of its group leaves it out (`without`)

    @property
    def name(self) -> str:
        """The last part of the path; unique within a command, so it serves as the flag's name."""
        return self.path[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """What a flag or a word may call it."""
        alias = self.field.metadata.get("alias")
        return (self.name, *((alias,) if alias else ()), *OTHER_NAMES.get(self.name, ()))


def leaves(cls: type, used: bool = True) -> Iterator[Leaf]:
    """Yield every setting that a config class uses (or leaves out), depth first, in order of declaration."""
    return (leaf for leaf in _every_leaf(cls) if leaf.used is used)


@functools.cache  # asked for every word of a recipe
def _every_leaf(
    cls: type, prefix: tuple[str, ...] = (), without: frozenset[tuple[str, ...]] = frozenset()
) -> tuple[Leaf, ...]:
    found: list[Leaf] = []
    for name, (field, hint) in _fields(cls).items():
        path = (*prefix, name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            more = {(*path, *left.split(".")) for left in field.metadata.get("without", ())}
            found += _every_leaf(hint, path, without | more)
        else:
            found.append(Leaf(path, hint, field, not any(path[: len(part)] == part for part in without)))
    return tuple(found)


@functools.cache  # a cache's manifest has a record for every shard
def _fields(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # what others call our values


def nearest(key: str, cls: type) -> list[tuple[str, ...]]:
    """Return the paths of the three settings whose names or aliases are nearest to a word."""
    paths = {name: leaf.path for leaf in leaves(cls) for name in leaf.names}
    near = difflib.get_close_matches(key.rpartition(".")[2].replace("-", "_"), paths, n=9, cutoff=0)
    return list(dict.fromkeys(paths[name] for name in near))[:3]


def _nearest(key: str, cls: type) -> str:
    return f"the nearest: {', '.join(map('.'.join, nearest(key, cls)))}; --help-all shows all"


def _coerce(value: Any, hint: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if type(None) in args:
                return None
            raise ConfigError(f"{where}: may not be empty")
        words = [word for hint in args if typing.get_origin(hint) is Literal for word in typing.get_args(hint)]
        if value in words:  # a word in place of a number
            return value
        try:
            return _coerce(value, next(a for a in args if a is not type(None)), where)
        except ConfigError as error:
            raise ConfigError(" or ".join([str(error), *words])) from None
    if origin is Literal:
        value = value if value in args else _SHORT.get(str(value), value)
        if value not in args:
            near = [f"did you mean {word!r}? " for word in difflib.get_close_matches(str(value), map(str, args), n=1)]
            raise ConfigError(f"{where}: {value!r} is unknown; {''.join(near)}allowed: {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else () if value is None else value
        if not isinstance(items, Sequence):
            items = [items]
        items = [v.strip() if isinstance(v, str) else v for v in items]
        return tuple(_coerce(v, args[0], where) for v in items if v != "" and items != ["none"])
    if hint is bool:
        word = str(value).lower()
        if word in ("true", "yes", "1", "false", "no", "0"):
            return word in ("true", "yes", "1")
        raise ConfigError(f"{where}: {value!r} is not a switch; allowed: true, false")
    if hint in (int, float):
        number = _number(value)
        if number is None or (hint is int and number != int(number)):
            raise ConfigError(f"{where}: {value!r} is not {'a whole number' if hint is int else 'a finite number'}")
        return hint(number)
    if hint is str:
        if isinstance(value, Mapping | list | tuple):
            raise ConfigError(f"{where}: {value!r} is not a text")
        if "\0" in str(value):
            raise ConfigError(f"{where}: {value!r} holds a NUL character, which no path does")
        return str(value)
    raise TypeError(f"{where}: settings of type {hint} are not supported")  # a defect of ours


def _exact(value: Any, hint: Any, where: str) -> Any:
    """Return a JSON value that is of the declared type already, or say why not; lists become tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where, exact=True)
    if hint is Any or (value is None and type(None) in args):
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_exact(item, args[0], where) for item in value)
    kind = {tuple: list, dict: dict}.get(origin, args[0] if type(None) in args else hint)
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is not kind or (kind is int and value < 0):
        raise ConfigError(f"{where}: {value!r} is not {'a whole number' if kind is int else 'a ' + kind.__name__}")
    return value


def _number(value: Any) -> int | float | None:
    """Read a number, whole ones exactly at any size; None for anything else, infinities and NaN included."""
    if isinstance(value, bool):
        return None
    for kind in (int, float):
        try:
            number = kind(value) if isinstance(value, str) else value
            return number if math.isfinite(number) else None
        except (TypeError, ValueError, OverflowError):
            continue
    return None


def from_dict(cls: type[C], data: Mapping[str, Any], where: str = "", *, exact: bool = False) -> C:
    """Build a dataclass from a nested mapping, which errors call `where`; ConfigError names the field and what fits.

    With `exact`, for files that a program wrote, all fields have to be there, and no value is converted, so that damage
    or a file of another version cannot pass for something else. Whole numbers are 0 or more.
    """
    if not isinstance(data, Mapping):
        expected = "an object" if exact else "`name: value` lines"
        raise ConfigError(f"{where or 'settings'}: expected {expected}, got {type(data).__name__}")
    fields = _fields(typing.cast(Any, cls))
    if exact and data.keys() != fields.keys():
        odd = ", ".join(map(repr, sorted(data.keys() ^ fields.keys())))
        raise ConfigError(f"{where}: keys that should not be there, or are missing: {odd}")
    values: dict[str, Any] = {}
    for key, value in data.items():
        at = f"{where}.{key}" if where else str(key)
        if key not in fields:
            raise ConfigError(f"{at}: no such setting; {_nearest(key, cls)}")
        field, hint = fields[key]
        if field.metadata.get("on") is not None and str(value).lower() in ("true", "false"):
            value = field.metadata["on"] if str(value).lower() == "true" else 0.0
        values[key] = _exact(value, hint, at) if exact else _coerce(value, hint, at)
        if not exact:
            _refuse_large(field, values[key], at)
    return cls(**values)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested plain values, fit for YAML and JSON, without what it does not use."""
    tree: dict[str, Any] = {}
    for leaf in leaves(type(config)):
        _put(tree, leaf.path, functools.reduce(getattr, leaf.path, config))
    return json.loads(json.dumps(tree, default=dataclasses.asdict))


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{part}: is a group of settings; expected `name: value` lines in it")
    tree[path[-1]] = value


def _means(key: str, leaf: Leaf) -> bool:
    """Tell whether a word names a setting: by its dotted path, its last name or another name."""
    return key == ".".join(leaf.path) or key.replace("-", "_") in leaf.names


def refuse_unused(cls: type, key: str) -> None:
    """Raise ConfigError for a word that names a setting without use here; other words pass."""
    meant = [leaf.used for leaf in _every_leaf(cls) if _means(key, leaf)]
    if meant and not any(meant):
        raise ConfigError(f"{key}: this command does not use it; leave it out")


def setting_path(cls: type, key: str) -> tuple[str, ...]:
    """Return the path of the one setting that a word means (`_means`); ConfigError: none, several, or no use for it.

    A group before the name may be another than ours, since others sort the same settings differently: `train.epochs`.
    """
    refuse_unused(cls, key)
    group, _, name = key.rpartition(".")
    found = [leaf for leaf in leaves(cls) if _means(key, leaf)]
    if not found and group in {leaf.path[0] for leaf in leaves(cls) if len(leaf.path) > 1}:
        refuse_unused(cls, name)
        named = [leaf for leaf in leaves(cls) if _means(name, leaf)]
        found = [leaf for leaf in named if leaf.path[0] == group] or named
    if len(found) != 1:
        wrong = f"means {', '.join('.'.join(leaf.path) for leaf in found)}; name one in full" if found else ""
        raise ConfigError(f"{key}: {wrong or f'no such setting; {_nearest(key, cls)}'}")
    return found[0].path


def resolve(
    cls: type[C], *, recipe: str | Path | None = None, flags: Mapping[Way, Any] | None = None, words: Sequence[str] = ()
) -> C:
    """Merge a recipe (YAML, nested or flat), flags and words into one config; ConfigError names what does not fit."""
    tree: dict[str, Any] = {}
    if recipe is not None:
        groups = {leaf.path[0] for leaf in leaves(cls) if len(leaf.path) > 1}
        for key, value in load_yaml(recipe).items():
            if key not in groups:
                _put(tree, setting_path(cls, str(key)), value)
            elif isinstance(value, Mapping | None):
                for name, inner in (value or {}).items():
                    path = (key, str(name)) if isinstance(inner, Mapping) else setting_path(cls, f"{key}.{name}")
                    _put(tree, path, inner)
            else:
                raise ConfigError(f"recipe {recipe}: {key} is a group of settings; expected `name: value` lines in it")
    for path, value in (flags or {}).items():
        _put(tree, path, value)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r}: expected a setting as name=value, for example train.lr=3e-4")
        _put(tree, setting_path(cls, key), value)
    for leaf in leaves(cls, used=False):
        if _holds(tree, leaf.path):
            refuse_unused(cls, ".".join(leaf.path))
    return from_dict(cls, tree)


def _holds(tree: Any, path: Sequence[str]) -> bool:
    return not path or (isinstance(tree, Mapping) and path[0] in tree and _holds(tree[path[0]], path[1:]))


class _BoundedLoader(yaml.SafeLoader):
    """Refuses aliases, by which ten lines can be 10^9 values, and too many or too deep values, before any is built."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it repeats a value by an alias; write the value out")
        self._depth, self._count = self._depth + 1, self._count + 1
        if self._depth > YAML_LIMIT_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {YAML_LIMIT_DEPTH} deep")
        if self._count > YAML_LIMIT_VALUES:
            raise yaml.YAMLError(f"it holds more than {YAML_LIMIT_VALUES:,} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def parse_yaml(text: str) -> Any:
    """Parse YAML of somebody else's, within bounds of size, depth and repetition; ConfigError says why not."""
    if len(text) > YAML_LIMIT_BYTES:
        raise ConfigError(f"it is larger than {YAML_LIMIT_BYTES:,} bytes")
    try:
        data = yaml.load(text, _BoundedLoader)
        repr(data)  # whole numbers of thousands of digits cannot be shown, so nothing could be said about them
        return data
    except Exception as error:  # the constructors of dates, numbers and tags raise whatever theirs do
        raise ConfigError(str(error) or type(error).__name__) from None


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; ConfigError: the file is missing, is not YAML, or holds no mapping."""
    try:
        with Path(path).open("rb") as file:
            data = parse_yaml(file.read(YAML_LIMIT_BYTES + 1).decode("utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"recipe {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"recipe {path}: is not UTF-8 text; give a YAML file") from None
    except ConfigError as error:
        raise ConfigError(f"recipe {path}: is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {path}: expected `name: value` lines")
    return data


def save_yaml(config: Any, path: str | Path) -> None:
    """Write a config as YAML, in order of declaration, without the credentials of addresses in it."""
    write_text(Path(path), redact(yaml.safe_dump(to_dict(config), sort_keys=False)))


def fingerprint(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON: equal settings, equal text, on every machine."""
    plain = to_dict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
