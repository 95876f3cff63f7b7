"""Chat templates: programs of others, rendered with jinja2 in a sandbox that also bounds their time and what they build.

The sandbox of jinja2 keeps a template away from this process; it lets one loop for ever or build a text of any size. Here
every loop, call and operation looks at the clock, and everything that makes a text or list larger looks at its size first.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.files.errors import ConversionError, reading, shown

MAX_SECONDS = 10.0
MAX_CHARACTERS = 1 << 25
"""Of a rendered conversation, and of every text on the way: some eight million tokens."""
MAX_ITEMS = 1 << 20
MAX_BITS = 1 << 12
_clock = threading.local()


class TooMuch(jinja2.TemplateError):
    """A template that takes too long or builds too much."""


class ChatTemplate:
    """A compiled template.

    Raises ConversionError when the source is not valid.
    """

    def __init__(self, source: str):
        try:
            with reading("the chat template"):
                self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConversionError(f"the chat template is not valid: {shown(error)}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text.

        Raises:
          ConversionError: the template refuses its input, fails, takes more than `MAX_SECONDS`, or builds more than
            `MAX_CHARACTERS`.
        """
        _clock.ends = time.monotonic() + MAX_SECONDS
        pieces, size = [], 0
        try:
            with reading("the chat template"):
                for piece in self._template.generate(**variables):
                    size = _fits(size + len(piece))
                    _tick()
                    pieces.append(piece)
        except jinja2.TemplateError as error:
            raise ConversionError(f"the chat template refuses these messages: {shown(error, 1000)}") from None
        return "".join(pieces)


def _tick() -> str:
    if time.monotonic() > getattr(_clock, "ends", float("inf")):
        raise TooMuch(f"it takes more than {MAX_SECONDS:g} seconds")
    return ""


def _fits(size: int, most: int | None = None) -> int:
    most = MAX_CHARACTERS if most is None else most
    if size > most:
        raise TooMuch(f"it builds a text or list of {shown(size)}, at most {most} are made")
    return size


def _sized(value: Any) -> Any:
    """The value itself, when it is not too large."""
    if isinstance(value, str | bytes):
        _fits(len(value))
    elif isinstance(value, list | tuple | dict):
        _fits(len(value), MAX_ITEMS)
    elif isinstance(value, int):
        _fits(value.bit_length(), MAX_BITS)
    return value


def _concat(parts: Iterable[Any]) -> str:
    _tick()
    texts, size = [], 0
    for part in parts:
        texts.append(part if isinstance(part, str) else str(_sized(part)))
        size = _fits(size + len(texts[-1]))
    return "".join(texts)


def _check_call(name: str, subject: Any, arguments: Iterable[Any]) -> None:
    """Refuses a call of a method or filter whose result would be too large; the names are those of str and of jinja2."""
    _tick()
    arguments = list(arguments)
    for value in arguments:
        if isinstance(value, int):
            _fits(abs(value), MAX_CHARACTERS)  # a width, a count
    texts = [a for a in arguments if isinstance(a, str)]
    if name == "replace" and isinstance(subject, str) and len(texts) >= 2:
        _fits(len(subject) + subject.count(texts[0]) * len(texts[1]))
    elif name in ("format", "format_map") and isinstance(subject, str):
        _fits(max(map(int, re.findall(r"\d{1,20}", subject)), default=0), 1 << 16)
        _fits(len(subject) * (1 + max(map(len, texts), default=0)))
    elif name in ("join", "translate", "expandtabs", "indent"):
        items = (
            subject if isinstance(subject, list | tuple) else next((a for a in arguments if isinstance(a, list | tuple)), ())
        )
        glue = max([len(t) for t in texts] + ([len(subject)] if isinstance(subject, str) and items else []), default=0)
        widths = [a for a in arguments if isinstance(a, int)]
        _fits(sum(len(i) if isinstance(i, str) else 1 for i in items) + glue * len(items))
        if isinstance(subject, str) and not items:
            lines = 1 + subject.count("\t" if name == "expandtabs" else "\n")
            _fits(len(subject) + lines * max(widths + [glue], default=0))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    concat = staticmethod(_concat)

    def call_binop(self, context, operator, left, right):
        _tick()
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str) and isinstance(count, int):
                    _fits(len(value) * count)
                elif isinstance(value, list | tuple) and isinstance(count, int):
                    _fits(len(value) * count, MAX_ITEMS)
            if isinstance(left, int) and isinstance(right, int):
                _fits(left.bit_length() + right.bit_length(), MAX_BITS)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _fits(left.bit_length() * abs(right), MAX_BITS)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _fits(len(left) + len(right), MAX_CHARACTERS if isinstance(left, str) else MAX_ITEMS)
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            _check_call("format", left, values)
            if "*" in left:
                raise TooMuch("it formats with a width of its own")
        return super().call_binop(context, operator, left, right)

    def call(self, context, called, *arguments, **options):
        inner = getattr(called, "__wrapped__", called)  # the sandbox puts a guard of its own around str.format
        subject = getattr(inner, "__self__", None)
        _check_call(getattr(called, "__name__", ""), subject, (*arguments, *options.values()))
        return _sized(super().call(context, called, *arguments, **options))

    def _parse(self, source, name, filename):
        """The syntax tree with a look at the clock in every loop, and ``~`` in terms of `_concat`."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.Output([nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)]))
        _without_concat(tree)
        return tree.set_environment(self)


def _without_concat(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_joined(entry) for entry in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _joined(value))


def _joined(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    _without_concat(node)
    if isinstance(node, nodes.Concat):
        return nodes.Call(nodes.Name("_concat", "load"), [nodes.List(node.nodes, lineno=node.lineno)], [], None, None)
    return node


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at the sizes of its arguments and its result."""

    @functools.wraps(function)  # its marks (pass_context and the like) come along
    def wrapped(*arguments, **options):
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        subject = arguments[first] if len(arguments) > first else None
        _check_call(name, subject, (*arguments[first + 1 :], *options.values()))
        return _sized(function(*arguments, **options))

    return wrapped


def _refuse(message: Any) -> None:
    raise jinja2.TemplateError(shown(message, 1000))


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    """The sandbox, with the helpers that published templates expect."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _bounded(name, function) for name, function in environment.filters.items()}
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "_tick": _tick,
        "_concat": _concat,
    }
    return environment
