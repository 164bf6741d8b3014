"""Conversion between messages and dataclasses, planned once from the names of their fields.

Presence follows the dataclass: a field that a message leaves out takes the default, or None, and is
refused as not set if there is neither. A default of -1 stands for "none", which no number on the
wire may say. A field without a counterpart is found when the conversion is made, not when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import IntEnum
from functools import partial
from types import NoneType
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.controller.config import ConfigError
from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import NONE_ID

EnumT = TypeVar("EnumT", bound=IntEnum)

Read: TypeAlias = Callable[[Any, str], Any]
"""Function that returns the value of a field's content. Errors contain its path.

Raises:
    InvalidRequestError: the content is none of the field's values.
"""

Write: TypeAlias = Callable[[Any], Any]
"""Returns the content of a field for a value."""


@dataclass(eq=False)
class Conversion:
    """Plans readers and writers, with special rules for some kinds.

    `reads` and `writes` replace the planned conversion for fields of a kind. The kind of a repeated
    field is the kind of the whole field or of one item. `checks` validate each value of a kind
    after it is read.
    """

    _reads: Mapping[Any, Read]
    _writes: Mapping[Any, Write]
    _checks: Mapping[type, Callable[[Any], None]]

    def extended(
        self, *, reads: Mapping[Any, Read] | None = None, writes: Mapping[Any, Write] | None = None
    ) -> Conversion:
        """Return a conversion with further rules."""
        return Conversion(
            {**self._reads, **(reads or {})}, {**self._writes, **(writes or {})}, self._checks
        )

    def reader(
        self, kind: type, message_class: type[Message], *unread: str, **given: object
    ) -> Callable[..., Any]:
        """Return a function that reads a `kind` from a message and its path.

        The message's fields `unread` are ignored. `given` are constants of the `kind`.

        Raises:
            TypeError: a field of either has no counterpart.
        """
        # Planned once, because resolving hints for each message would cost more than reading it.
        hints = get_type_hints(kind)
        defaults = {part.name: part.default for part in fields(kind) if part.name not in given}
        wire = _fields(message_class)
        # A field added to the contract alone would be ignored silently, so this fails at import.
        if unmatched := set(wire) - set(unread) ^ set(defaults):
            raise TypeError(f"{kind.__name__} and {message_class.__name__} differ in {unmatched}")
        steps = [
            (name, self._field_reader(wire[name], hints[name], default))
            for name, default in defaults.items()
        ]

        check = self._checks.get(kind)

        def read(message: Message, path: str = "") -> Any:
            prefix = f"{path}." if path else ""
            value = kind(**given, **{name: step(message, prefix) for name, step in steps})
            if check is not None:
                check(value)
            return value

        return read

    def writer(self, kind: type, message_class: type[Message], *given: str) -> Callable[..., Any]:
        """Return a function from a `kind`, and the fields `given` by name, to a message.

        Raises:
            TypeError: a field of the message is neither given nor one of the dataclass.
        """
        hints = get_type_hints(kind)
        wire = _fields(message_class)
        if missing := set(wire) - set(hints) - set(given):
            raise TypeError(f"{kind.__name__} has no {missing} for {message_class.__name__}")
        steps = [
            (name, self._value_writer(wire[name], hints[name]), wire[name].has_presence)
            for name in wire
            if name not in given
        ]

        def write(value: Any, **content: Any) -> Any:
            for name, convert, may_be_absent in steps:
                part = getattr(value, name)
                # -1 stands for absence inside, and must not appear on the wire.
                if part is None or (may_be_absent and part == NONE_ID):
                    continue
                content[name] = part if convert is None else convert(part)
            return message_class(**content)

        return write

    def _field_reader(self, field: FieldDescriptor, hint: Any, default: object) -> Read:
        name = field.name
        if field.is_repeated:
            return self._list_reader(field, hint)
        is_optional = NoneType in get_args(hint)
        convert = self._value_reader(field, get_args(hint)[0] if is_optional else hint)
        if convert is None:
            if not field.has_presence:
                # The most frequent case, without presence and conversion, is one attribute access.
                return lambda message, _: getattr(message, name)
            convert = _as_it_is
        if not field.has_presence or (field.message_type is not None and not is_optional):
            return lambda message, prefix: convert(getattr(message, name), f"{prefix}{name}")
        absent = None if is_optional and default is MISSING else default

        def read(message: Message, prefix: str) -> Any:
            if message.HasField(name):
                value = convert(getattr(message, name), f"{prefix}{name}")
                # A caller that sends -1 would otherwise be understood as having sent nothing.
                if absent == NONE_ID and value < 0:
                    wanted = "expected 0 or more, or no value"
                    raise InvalidRequestError(f"{prefix}{name}", f"{value}; {wanted}")
                return value
            if absent is MISSING:
                raise not_set(f"{prefix}{name}")
            return absent

        return read

    def _list_reader(self, field: FieldDescriptor, hint: Any) -> Read:
        name = field.name
        # A rule for the whole list, such as a column, replaces the conversion of each item.
        if (whole := self._reads.get(hint)) is not None:
            return lambda message, prefix: whole(getattr(message, name), f"{prefix}{name}")
        convert = self._value_reader(field, get_args(hint)[0])
        if convert is None:
            return lambda message, _: tuple(getattr(message, name))
        return lambda message, prefix: tuple(
            convert(item, f"{prefix}{name}[{index}]")
            for index, item in enumerate(getattr(message, name))
        )

    def _value_reader(self, field: FieldDescriptor, kind: Any) -> Read | None:
        # Special rules come before the planned ones, so that they can replace these.
        if kind in self._reads:
            return self._reads[kind]
        if field.message_type is not None:
            return self.reader(kind, GetMessageClass(field.message_type))
        if isinstance(kind, type) and issubclass(kind, IntEnum):
            return partial(enum_in, kind)
        return None

    def _value_writer(self, field: FieldDescriptor, hint: Any) -> Write | None:
        if hint in self._writes:
            return self._writes[hint]
        kind = next((part for part in get_args(hint) if part is not NoneType), hint)
        convert = self._writes.get(kind)
        if convert is None and field.message_type is not None:
            convert = self.writer(kind, GetMessageClass(field.message_type))
        if convert is None or not field.is_repeated:
            return convert
        return partial(map, convert)


def _fields(message_class: type[Message]) -> Mapping[str, FieldDescriptor]:
    return cast(Mapping[str, FieldDescriptor], message_class.DESCRIPTOR.fields_by_name)


def _as_it_is(content: Any, _: str) -> Any:
    return content


def not_set(path: str) -> InvalidRequestError:
    """Return the error for a field that must be set, even to zero."""
    return InvalidRequestError(path, "not set, must be 0 or more")


def not_negative(value: int, path: str) -> int:
    """Return `value`. Raises InvalidRequestError if it is below 0."""
    if value < 0:
        raise InvalidRequestError(path, f"{value}, must be 0 or more")
    return value


def enum_in(kind: type[EnumT], number: int, path: str) -> EnumT:
    """Read a value of an enum, of which a newer caller may know more values.

    Raises:
        InvalidRequestError: the value is not set, or this version does not know it.
    """
    # To call the enum would take several times as long.
    if (member := kind._value2member_map_.get(number)) is not None:
        return cast(EnumT, member)
    known = ", ".join(f"{member.name} ({member.value})" for member in kind)
    given = number or "not set"
    raise InvalidRequestError(path, f"{given}, must be one of {known}")


def checked(check: Callable[[str, Any], None], value: Any, path: str) -> Any:
    """Return `value` if it passes a check of the configuration.

    Raises:
        InvalidRequestError: the check failed.
    """
    try:
        check(path, value)
    except ConfigError as error:
        raise InvalidRequestError(path, str(error).removeprefix(f"{path}: ")) from None
    return value
