"""Decides whether a regular expression from an adapter's config matches a module's path.

PEFT hands target_modules, exclude_modules and the keys of rank_pattern and alpha_pattern to `re`,
which backtracks: a hostile pattern such as (a+)+$ never ends. Here a pattern is parsed by the
standard library and then matched by walking *sets of positions*: every node maps the positions
where it may start to those where it may end. That answers the same question, whole match or not, in
bounded time: no set outgrows the path, `_STEPS_MAX` ends what nests too cleverly. What cannot be
decided this way (back references, atomic groups, flags) is refused.
"""

import re
import re._constants as sre  # type: ignore[import-not-found]  # no stubs for these two
import re._parser as sre_parser  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

_PATTERN_MAX = 8192
_STEPS_MAX = 10_000  # per path; the longest pattern seen in the wild takes 1,500
_SIMPLE = re.compile(r"\^?(?:[A-Za-z0-9_.-]|\\\.)*\$?")
_Positions = frozenset[int]


class PatternError(ValueError):
    """A pattern that is not a regular expression, or one that is not decided here."""


@lru_cache(maxsize=65536)
def fully_matches(pattern: str, path: str) -> bool:
    """Whether re.fullmatch(pattern, path) would match. Raises PatternError."""
    return len(path) in _Matcher(path).run(_parse(pattern), frozenset({0}))


@lru_cache(maxsize=65536)
def matches_key(key: str, path: str) -> bool:
    """PEFT's rule for keys of rank_pattern and alpha_pattern: re.match(rf"(.*\\.)?({key})$", path).

    Raises PatternError.
    """
    if _SIMPLE.fullmatch(key):  # a name with dots: `re` cannot backtrack far, and is 50x faster
        return _simple_key(key).match(path) is not None
    return fully_matches(rf"(.*\.)?({key})$", path)


@lru_cache(maxsize=4096)
def _simple_key(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


@lru_cache(maxsize=1024)
def _parse(pattern: str) -> tuple[Any, ...]:
    if len(pattern) > _PATTERN_MAX:
        raise PatternError(f"longer than {_PATTERN_MAX} characters")
    try:
        tree = sre_parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise PatternError(f"not a regular expression: {error}") from None
    except RecursionError:
        raise PatternError("nested too deeply") from None
    if tree.state.flags & ~re.UNICODE.value:
        raise PatternError("uses flags, which are not supported here")
    return tuple(tree)


class _Matcher:
    """One path, matched by sets of positions."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._steps = 0

    def run(self, nodes: Iterable[Any], starts: _Positions) -> _Positions:
        """Where the sequence `nodes` may end when it starts at any of `starts`."""
        try:
            for node in nodes:
                if not starts:
                    break
                starts = self._node(node, starts)
        except RecursionError:
            raise PatternError("nested too deeply") from None
        return starts

    def _node(self, node: Any, starts: _Positions) -> _Positions:
        self._steps += 1
        if self._steps > _STEPS_MAX:
            raise PatternError("takes too long to match")
        op, value = node
        if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            return self._step(_character_test(op, value), starts)
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, nodes = value
            return self._repeat((least, most), nodes, starts)
        if op is sre.BRANCH:
            return frozenset().union(*(self.run(branch, starts) for branch in value[1]))
        if op is sre.SUBPATTERN:
            _, add_flags, del_flags, nodes = value
            if add_flags or del_flags:
                raise PatternError("uses flags, which are not supported here")
            return self.run(nodes, starts)
        if op is sre.AT:
            return frozenset(p for p in starts if self._at(value, p))
        if op in (sre.ASSERT, sre.ASSERT_NOT):
            direction, nodes = value
            wanted = op is sre.ASSERT
            return frozenset(p for p in starts if self._looks(direction, nodes, p) is wanted)
        raise PatternError(f"uses {str(op).lower()}, which is not supported here")

    def _step(self, test: Callable[[str], bool], starts: _Positions) -> _Positions:
        path = self._path
        return frozenset(p + 1 for p in starts if p < len(path) and test(path[p]))

    def _repeat(self, times: tuple[int, Any], nodes: Any, starts: _Positions) -> _Positions:
        """Positions only grow, so after len(path) + 1 rounds a further one adds nothing."""
        least, most = times
        rounds = len(self._path) + 1
        for _ in range(min(least, rounds)):
            starts = self.run(nodes, starts)
        ends = starts
        extra = rounds if most is sre.MAXREPEAT else min(most - least, rounds)
        for _ in range(extra):
            starts = self.run(nodes, starts) - ends
            if not starts:
                break
            ends |= starts
        return ends

    def _at(self, where: Any, position: int) -> bool:
        path = self._path
        if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            return position == 0
        if where in (sre.AT_END, sre.AT_END_STRING):
            return position == len(path)
        before = position > 0 and _is_word(path[position - 1])
        after = position < len(path) and _is_word(path[position])
        if where is sre.AT_BOUNDARY:
            return before is not after
        if where is sre.AT_NON_BOUNDARY:
            return before is after
        raise PatternError(f"uses {str(where).lower()}, which is not supported here")

    def _looks(self, direction: int, nodes: Any, position: int) -> bool:
        if direction > 0:
            return bool(self.run(nodes, frozenset({position})))
        width, widest = nodes.getwidth()
        if width != widest:
            raise PatternError("looks behind by a varying width")
        start = position - width
        return start >= 0 and position in self.run(nodes, frozenset({start}))


def _character_test(op: Any, value: Any) -> Callable[[str], bool]:
    if op is sre.ANY:
        return lambda c: c != "\n"
    if op is sre.LITERAL:
        return lambda c: ord(c) == value
    if op is sre.NOT_LITERAL:
        return lambda c: ord(c) != value
    negate = value[0][0] is sre.NEGATE
    members = value[1:] if negate else value
    return lambda c: any(_is_member(c, member) for member in members) is not negate


def _is_member(character: str, member: Any) -> bool:
    op, value = member
    if op is sre.LITERAL:
        return bool(ord(character) == value)
    if op is sre.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    if op is sre.CATEGORY:
        test, wanted = _CATEGORIES[value]
        return test(character) is wanted
    raise PatternError(f"uses {str(op).lower()}, which is not supported here")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CATEGORIES: dict[Any, tuple[Callable[[str], bool], bool]] = {
    sre.CATEGORY_DIGIT: (str.isdecimal, True),
    sre.CATEGORY_NOT_DIGIT: (str.isdecimal, False),
    sre.CATEGORY_SPACE: (str.isspace, True),
    sre.CATEGORY_NOT_SPACE: (str.isspace, False),
    sre.CATEGORY_WORD: (_is_word, True),
    sre.CATEGORY_NOT_WORD: (_is_word, False),
}
