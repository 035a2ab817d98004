"""Options of a command line that are settings: the ``dest`` of an option is the name of the field it sets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from io_daemon.config import Fault, FaultKind
from io_daemon.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)
_FAULT: Final[TypeAdapter[Fault]] = TypeAdapter(Fault)


def settings_from(arguments: argparse.Namespace, model: type[Settings], **others: object) -> Settings:
    """Every field that an option names, and ``others``, which win. Raises ValidationError, ConfigError."""
    named = {name: value for name, value in vars(arguments).items() if name in model.model_fields}
    return model.model_validate({**named, **others})


def as_typed(error: ConfigError, parser: argparse.ArgumentParser) -> ConfigError:
    """The same mistake, but said of the option that was typed, where the key is one's ``dest`` or long name."""
    key = error.key.partition(".")[0]  # which of several values it was is seen by the value
    for action in parser._actions:
        name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
        if key in (action.dest, name.removeprefix("--").replace("-", "_")):
            return ConfigError(name, error.value, error.remedy)
    return error


def parse_name(text: str) -> str:
    """A path as it was typed. Refuses an empty word, as an unset variable of a shell leaves it: it would be the working
    directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a path, or . for this directory")
    return text


def parse_path(text: str) -> Path:
    return Path(parse_name(text))


def parse_fault(text: str) -> Fault:
    """``what:nth:value``, e.g. ``errno_read:3:5``."""
    try:
        return _FAULT.validate_python(tuple(text.split(":")))
    except ValidationError as error:
        kinds = ", ".join(get_args(FaultKind))
        raise argparse.ArgumentTypeError(
            f"{text!r}: write what:nth:value, for example errno_read:3:5, with what one of {kinds}"
        ) from error
