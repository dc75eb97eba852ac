"""YAML and dotted overrides to a `Config`, and back.

An unknown key is an error that names the nearest known one; so are a duplicate key, a wrong type
and a value out of range, each with the dotted path, the value and what would be right.

As a program it prints settings, one a line, for shell scripts:
`python -m dspark.config_io FILE target.path train.output_dir -- [section.key=value ...]`.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dspark.config import Config
from dspark.errors import ConfigError, DSparkError, nearest
from dspark.provenance import write_text

__all__ = ["dump", "from_mapping", "load", "main", "merge", "parse_overrides", "save"]


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, reads 1e-4 as a number and `no` as a word."""

    # YAML 1.1 also takes on, off, yes and no for booleans; settings name some of these
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own interface)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: the key {key!r} is no word; settings have names")
            if key in seen:
                raise ConfigError(f"line {line}: the key '{key}' stands twice; keep one of them")
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    "tag:yaml.org,2002:bool", re.compile(r"^([Tt]rue|TRUE|[Ff]alse|FALSE)$"), list("tTfF")
)
# YAML 1.1 wants a dot and a signed exponent in a float; people write 1e-4.
_Loader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _parse(text: str, source: str) -> Any:
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
        _listify(value)  # finds no end in a value that holds itself
        return value
    except RecursionError:
        raise ConfigError(
            f"{source} is nested too deeply, or holds a value inside itself (*x inside &x)"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{source} is not valid YAML{where}: {problem}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}, {error}") from None
    except ValueError as error:
        # what looks like a date or says it is a number, and is none
        raise ConfigError(f"{source} holds a value that is none: {error}") from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`section.key=value` (also `--section.key=value`, `--section.key value`) as a nested dict."""
    tree: dict[str, Any] = {}
    words = list(overrides)
    while words:
        word = words.pop(0)
        text = word.removeprefix("--")
        if "=" not in text and word.startswith("--") and words and "=" not in words[0]:
            text = f"{text}={words.pop(0)}"
        path, equals, raw = text.partition("=")
        if not equals or not path or any(not part for part in path.split(".")):
            file = f"; a settings file is given as --config {word}" if _is_file(word) else ""
            raise ConfigError(f"override '{word}' must look like section.key=value{file}")
        if "." not in path and path not in Config.model_fields and nearest(path, ["config"]):
            raise ConfigError(f"unknown option '{path}'; a settings file is given as --config PATH")
        value = _parse(raw, f"the value of '{path}'") if raw else ""
        if path in Config.model_fields and not isinstance(value, dict):
            # else the next override of that section would be blamed
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"override '{word}': section '{path}' must hold keys, got {shown!r}")
        here = tree
        *parents, leaf = path.split(".")
        for part in parents:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                raise ConfigError(f"override '{word}' gives '{path}' a value inside another value")
        here[leaf] = value
    return tree


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or Path(word).is_file()


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the leaves of ``over`` in their places."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _known_keys(path: Sequence[str | int], model: type[BaseModel]) -> Iterable[str]:
    """Keys of the section that ``path`` (without its last part) leads to."""
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
        elif isinstance(part, str):
            # the only list of models: sample.settings
            for argument in getattr(annotation, "__args__", ()):
                if isinstance(argument, type) and issubclass(argument, BaseModel):
                    model = argument
    return model.model_fields


# pydantic names Python's types where a user writes YAML
_WANTED = {
    "tuple_type": "must be a list such as [a, b]",
    "model_type": "must be keys with values such as {key: value}",
}


_COMMAND_LINE = "command line"
"""What is blamed for a fault that the file alone does not have."""
_MAY_HOLD_A_KEY = {"sample.endpoint": "@?#", "sample.api_key_env": "'"}
"""Settings whose wrong value is not shown if it holds one of these signs (a text is in quotes)."""


def _sentence(error: Any, source: str) -> str:
    path = [part for part in error["loc"] if part != "__root__"]
    dotted = ".".join(str(part) for part in path)
    if error["type"] == "extra_forbidden":
        known = list(_known_keys(path[:-1], Config))
        section = "".join(f"{part}." for part in path[:-1])
        hint = nearest(str(path[-1]), known, section) or f" (known: {', '.join(known)})"
        return f"{source}: unknown key '{dotted}'{hint}"
    message = _WANTED.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    value = error.get("input")
    value = list(value) if isinstance(value, tuple) else value
    shown = "" if isinstance(value, dict | BaseModel) else f", got {value!r}"
    if dotted in _MAY_HOLD_A_KEY and any(sign in shown for sign in _MAY_HOLD_A_KEY[dotted]):
        shown = ""
    return f"{source}: {dotted}: {message[0].lower()}{message[1:]}{shown}"


def from_mapping(
    tree: dict[str, Any], source: str = "settings", over: dict[str, Any] | None = None
) -> Config:
    """Check ``tree`` with ``over`` (of the command line) in its places, and build the settings.

    Raises:
        ConfigError: one line for each fault, with its dotted path.
    """
    try:
        return _checked(merge(tree, over or {}))
    except ValidationError as error:
        before = _faults(tree) if over else None
        raise ConfigError(
            "\n".join(
                _sentence(e, source if before is None or _what(e) in before else _COMMAND_LINE)
                for e in error.errors()
            )
        ) from None


def _checked(tree: dict[str, Any]) -> Config:
    # lax types would take "8" for 8 and True for 1: a quoted number is nearly always a mistake
    return Config.model_validate(_listify(tree), strict=True)


def _faults(tree: dict[str, Any]) -> list[tuple[Any, ...]]:
    try:
        _checked(tree)
    except ValidationError as error:
        return [_what(one) for one in error.errors()]
    return []


def _what(error: Any) -> tuple[Any, ...]:
    """A fault as it is the same with and without an override beside it."""
    value = error["input"]
    return error["loc"], error["msg"], None if isinstance(value, dict | BaseModel) else value


def _listify(value: Any) -> Any:
    """YAML lists as tuples, and whole numbers stay ints: what strict validation expects."""
    if isinstance(value, dict):
        return {key: _listify(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_listify(item) for item in value)
    return value


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Settings from a YAML file (None: defaults only), changed by dotted overrides.

    Raises:
        ConfigError: the file is missing or not YAML, or a key or value is wrong.
    """
    tree: Any = {}
    source = "settings"
    if path is not None:
        source = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot read the config {path}: {reason}") from None
        tree = _parse(text, source) or {}
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} must hold sections (target:, draft:, …), not {tree!r}")
    for section, value in tree.items():
        if value is None:
            raise ConfigError(f"{source}: section '{section}' is empty; give it keys or remove it")
        # an override would take its place without a word
        if section in Config.model_fields and not isinstance(value, dict):
            raise ConfigError(f"{source}: section '{section}' must hold keys, got {value!r}")
    return from_mapping(tree, source, parse_overrides(overrides))


def dump(config: Config) -> str:
    """The resolved settings as YAML that `load` reads back to the same."""
    plain = config.model_dump(mode="json")
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def save(config: Config, path: Path) -> None:
    """Write `dump` to ``path``."""
    write_text(path, dump(config))


def main(argv: Sequence[str]) -> int:
    """Print the settings that are named before ``--``; exit code 0, or 2 with a sentence."""
    file, *rest = argv
    cut = rest.index("--") if "--" in rest else len(rest)
    try:
        config: Any = load(file, rest[cut + 1 :])
        for path in rest[:cut]:
            value = config
            for part in path.split("."):
                value = getattr(value, part)
            print(value)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
