"""``runtime.config_utils``: the base class of sections, which scripts and plugins derive their own from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final

import torch
from pydantic import BaseModel, ConfigDict, field_serializer

from infinity.deepspeed.logs import logger

KEPT_AUTO: Final = "replace_method"
"""The field of which "auto" is a value like others."""


class DeepSpeedConfigModel(BaseModel):
    """A section: "auto" is as good as nothing, fields can be assigned and are checked then.

    A field whose ``json_schema_extra`` has ``deprecated`` warns where it is given. With ``new_param``, a dotted name,
    its value goes there, through ``new_param_fn`` if that is given, unless ``set_new_param`` is false.

    Raises AssertionError where a deprecated field and the one that replaces it are both given.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **section: Any) -> None:
        """``strict``: "auto" is a value like others."""
        super().__init__(
            **{name: value for name, value in section.items() if strict or value != "auto" or name == KEPT_AUTO}
        )
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, Mapping) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, name: str, extra: Mapping[str, Any]) -> None:
        replacing: str = extra.get("new_param", "")
        words = f"; use {replacing} instead" if replacing else ""
        if message := extra.get("deprecated_msg", ""):
            words += f". {message}"
        logger.warning("config parameter %s is deprecated%s", name, words)
        if not replacing or not extra.get("set_new_param", True):
            return
        convert: Callable[[Any], Any] = extra.get("new_param_fn", lambda value: value)
        value = convert(getattr(self, name))
        delattr(self, name)
        *sections, last = replacing.split(".")
        section = reduce(getattr, sections, self)
        if last in section.model_fields_set:
            raise AssertionError(f"{name} is deprecated, and {replacing}, which replaces it, is given as well")
        setattr(section, last, value)

    @field_serializer("dtype", check_fields=False)
    def _serialise_dtype(self, dtype: torch.dtype) -> str:
        return str(dtype)


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """The default of a class's field. Raises AssertionError if it has no such field, or that is required."""
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        what = "is required" if field is not None else "is not a field"
        raise AssertionError(f"'{field_name}' {what} of {config.__name__}")
    return field.get_default()
