"""Jinja for templates that came with a model: no attributes of Python, bounded time and memory.

The immutable sandbox stops attribute walks and writes. It does not stop nested loops, doubling
strings, `9**9**9` or padded formats, so every loop turn, call, output and concatenation here is
paid from one budget, and what could allocate without paying is refused.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_DEADLINE_S = 2.0
MAX_WORK_CHARS = 64 * 2**20  # characters produced anywhere during one rendering
MAX_STRING_CHARS = 16 * 2**20
_MAX_INT_BITS = 4096
_REFUSED_FILTERS = (
    "batch", "center", "format", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
_REFUSED_METHODS = frozenset({"center", "expandtabs", "format_map", "ljust", "rjust", "zfill"})
_KEPT_GLOBALS = ("dict", "namespace", "range")


class RaisedByTemplate(TemplateError):
    """The template itself refuses the messages, through raise_exception()."""


class OverBudget(SecurityError):
    """The template asks for more time, memory or power than it may have."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self._deadline_s = time.monotonic() + RENDER_DEADLINE_S
        self._chars = MAX_WORK_CHARS

    def spend(self, num_chars: int = 1) -> None:
        """Pay for work. Raises OverBudget when time or characters are used up."""
        self._chars -= num_chars
        if self._chars < 0:
            raise OverBudget("the template produces too much text")
        if time.monotonic() > self._deadline_s:
            raise OverBudget(f"the template takes longer than {RENDER_DEADLINE_S:g} s")


_budget: ContextVar[Budget] = ContextVar("template_budget")


def start_budget() -> Budget:
    """Begin one rendering in the current context."""
    budget = Budget()
    _budget.set(budget)
    return budget


def _pay_for(value: Any) -> Any:
    budget = _budget.get(None)
    if budget is not None:
        size = len(value) if isinstance(value, str) else 16
        if size > MAX_STRING_CHARS:
            raise OverBudget("the template builds a string that is too long")
        budget.spend(size)
    return value


def _metered(values: Iterable[Any], turn_chars: int) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.spend(1 + turn_chars)
        yield value


def _concatenated(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _check_length(length: int) -> None:
    if length > MAX_STRING_CHARS:
        raise OverBudget("the template builds a string that is too long")
    _budget.get().spend(length)


def _refuse(message: str) -> NoReturn:
    raise RaisedByTemplate(str(message)[:200])


class _Meter(NodeTransformer):
    """Loops and `~` go through filters that pay."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        turn_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        arguments: list[nodes.Expr] = [nodes.Const(turn_chars)]
        node.iter = nodes.Filter(node.iter, "_metered", arguments, [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_concatenated", [], [], None, None)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block, as it stands."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, spelled as transformers spells it."""

    intercepted_binops = frozenset({"**", "*", "+", "%"})

    def __init__(self, filters: dict[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_pay_for,
            cache_size=0,
        )
        self.globals = {name: self.globals[name] for name in _KEPT_GLOBALS}
        self.globals["raise_exception"] = _refuse
        for name in _REFUSED_FILTERS:
            self.filters.pop(name, None)
        for name in ("join", "replace", "indent"):
            self.filters[name] = _bounded(name, self.filters[name])
        self.filters |= {"_metered": _metered, "_concatenated": _concatenated, **filters}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic whose result can be far larger than its operands."""
        if operator == "**":
            raise OverBudget("powers are not available in chat templates")
        if operator == "%" and isinstance(left, str):
            raise OverBudget("% formatting is not available in chat templates")
        if operator == "*":
            _check_product(left, right)
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format without format specifications: a width is memory."""
        if getattr(value, "__name__", "") in ("format", "format_map"):
            owner = getattr(value, "__self__", None)
            if isinstance(owner, str) and ":" in owner:
                raise OverBudget("format specifications are not available in chat templates")
        return super().wrap_str_format(value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call from a template: paid, and padded strings refused."""
        _budget.get().spend(16)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(obj, "__name__", ""), args)
        return super().call(context, obj, *args, **kwargs)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise OverBudget("the template computes a number that is too large")
        return
    for text, count in ((left, right), (right, left)):
        if isinstance(text, str | list | tuple) and isinstance(count, int):
            _check_length(len(text) * max(count, 0))


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _REFUSED_METHODS:
        raise OverBudget(f"str.{name} is not available in chat templates")
    if name == "replace" and len(args) >= 2:
        _check_length(_replaced_length(owner, str(args[0]), str(args[1])))
    if name == "join" and args and isinstance(args[0], list | tuple):
        _check_length(sum(len(str(part)) + len(owner) for part in args[0]))


def _replaced_length(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A built-in filter whose result is measured before it is built."""

    def replace(context: Any, text: Any, old: str, new: str, count: int | None = None) -> Any:
        _check_length(_replaced_length(str(text), old, new))
        return function(context, text, old, new, count)

    def join(context: Any, values: Iterable[Any], d: str = "", attribute: Any = None) -> Any:
        values = list(values)
        _check_length(sum(len(d) + len(str(value)) for value in values))
        return function(context, values, d, attribute)

    def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        if (width if isinstance(width, int) else len(width)) > 64:
            raise OverBudget("indent: at most 64 columns")
        _check_length(len(text) + 65 * (text.count("\n") + 1))
        return function(text, width, first, blank)

    wrappers: dict[str, Callable[..., Any]] = {"replace": replace, "join": join, "indent": indent}
    wrapper = wrappers[name]
    if hasattr(function, "jinja_pass_arg"):  # jinja passes the evaluation context first
        vars(wrapper)["jinja_pass_arg"] = function.jinja_pass_arg
    return wrapper
