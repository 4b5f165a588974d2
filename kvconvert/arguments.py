"""Arguments of public functions are checked where they enter, against the annotations of their parameters.

`Annotated` says more than a type: a range or tuple holds the values that are possible, a text says what to give. The
aliases below are such annotations.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from kvconvert.errors import UsageError, listed

P = ParamSpec("P")
T = TypeVar("T")
Rule = tuple[Callable[[Any], bool], str]  # whether a value is possible, and what to give


class _Where:
    """The values for which `holds` is true."""

    def __init__(self, holds: Callable[[Any], bool]) -> None:
        self._holds = holds

    def __contains__(self, value: object) -> bool:
        return self._holds(value)


# Empty text, as of a shell's unset variable, would be the current directory; no path holds a NUL.
NAMED = _Where(lambda value: value != "" and "\0" not in str(value))

_MOST = 2**63  # of whole numbers, in either direction
Count = Annotated[int, range(1, _MOST)]
Natural = Annotated[int, range(_MOST)]
Temperature = Annotated[float, _Where(lambda value: value >= 0), "0 (greedy) or a positive number"]
TopP = Annotated[float, _Where(lambda value: 0 < value <= 1), "a number above 0 and at most 1 (all tokens)"]
HeadBits = Annotated[int, (8,)]
SampleLength = Annotated[int, range(2, _MOST)]
BundlePlace = Annotated[str | Path, NAMED, "a bundle's directory, or its id on the Hub"]
ModelPlace = Annotated[str | Path, NAMED, "its directory, or its id on the Hub"]
Folder = Annotated[str | Path, NAMED, "a directory"]
File = Annotated[str | Path, NAMED, "the path of a file"]
Repository = Annotated[str, "the id of a repository on the Hub, user/name"]


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """A function that refuses (UsageError) arguments which do not fit the annotations of its parameters.

    What is imported for type checkers alone is left to the function itself.
    """
    signature, known = inspect.signature(function), inspect.unwrap(function).__globals__
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in by_place]

    @functools.cache
    def rules() -> dict[str, Rule]:  # at the first call, for classes name themselves
        found = {}
        for name, parameter in signature.parameters.items():
            if isinstance(parameter.annotation, str) and parameter.kind is not parameter.VAR_KEYWORD:
                with suppress(NameError):  # imported for type checkers
                    found[name] = _rule(eval(parameter.annotation, known))
        return found

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Binding them would take longer than many calls; what does not belong to a parameter is Python's to refuse.
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, (fits, wanted) in rules().items():
            if name in given and not fits(value := given[name]):
                # -1 on a command line arrives as -1.0; 5.0 where 5 is possible stays as it is.
                if isinstance(value, float) and value.is_integer() and abs(value) < _MOST and not fits(int(value)):
                    value = int(value)
                if isinstance(value, int) and abs(value) >= _MOST:
                    raise UsageError(f"`{name}` is a number of more than 64 bits; give a smaller one.")
                raise UsageError(f"`{name}` is {_said(value)}; give {wanted}.")
        return function(*args, **kwargs)

    return call


def checked_fields(record: type[T]) -> type[T]:
    """A dataclass whose fields are checked like arguments."""
    setattr(record, "__init__", checked(record.__init__))  # noqa: B010, mypy knows no other way
    return record


def _said(value: Any) -> str:
    """A value that fits into a sentence, or its type."""
    said = repr(value) if isinstance(value, str | bytes | int | float | list | tuple | dict | NoneType) else ""
    return said if 0 < len(said) <= 80 and said.isprintable() else f"of type {type(value).__name__}"


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_MOST <= value < _MOST


def _are_whole(values: Collection[Any]) -> bool:
    """The same of all entries of a list, of which a prompt has thousands."""
    return len(values) == 0 or (set(map(type, values)) == {int} and min(values) >= -_MOST and max(values) < _MOST)


# True is no number; nor are NaN, infinity, and what has more than 64 bits.
_TYPES: dict[Any, Rule] = {
    Any: (lambda value: True, "anything"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
    int: (_is_whole, "a whole number"),
    float: (lambda value: _is_whole(value) or (isinstance(value, float) and math.isfinite(value)), "a number"),
    str: (lambda value: isinstance(value, str), "text"),
    bytes: (lambda value: isinstance(value, bytes), "bytes"),
    Path: (lambda value: isinstance(value, os.PathLike), "a path"),
    Callable: (callable, "a function"),
}


@functools.cache
def _rule(annotation: Any) -> Rule:
    kind, parts = get_origin(annotation) or annotation, get_args(annotation)
    if kind in _TYPES:
        return _TYPES[kind]
    if kind is Literal:
        return lambda value: isinstance(value, str) and value in parts, listed(map(repr, parts), "or")
    if kind is Annotated:
        return _noted(_rule(parts[0]), parts[1:])
    rules = [_rule(part) for part in parts if part not in (..., NoneType)]
    if kind in (Union, UnionType):
        first, *others = (fits for fits, _ in rules)
        possible = (lambda value: any(fits(value) for fits in (first, *others))) if others else first
        words = listed(dict.fromkeys(words for _, words in rules), "or")
        return (lambda value: value is None or possible(value)) if NoneType in parts else possible, words
    if issubclass(kind, Mapping):
        (names, name), (entries, entry) = rules
        return (
            lambda value: isinstance(value, kind) and all(map(names, value)) and all(map(entries, value.values()))
        ), f"a dict from {name} to {entry}"
    if issubclass(kind, Collection) and rules:
        [(fits, entry)] = rules
        all_fit = _are_whole if fits is _is_whole else lambda value: all(map(fits, value))
        return (
            lambda value: isinstance(value, kind) and not isinstance(value, str | bytes) and all_fit(value)
        ), f"a list, each entry {entry}"
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return lambda value: isinstance(value, kind), f"{article} {kind.__name__}"


def _noted(rule: Rule, notes: tuple[str | Container[Any], ...]) -> Rule:
    """A rule with what `Annotated` adds to it."""
    fits, words = rule
    among: Any = next((note for note in notes if not isinstance(note, str)), None)
    said = next((note for note in notes if isinstance(note, str)), None)
    if said is not None:
        words = said
    elif isinstance(among, range):
        words = f"{words} from {among[0]} to {among[-1]}" if among.stop < _MOST else f"{words} of at least {among[0]}"
    elif among is not None:
        words = listed(map(repr, among), "or")
    return (fits if among is None else lambda value: fits(value) and value in among), words
