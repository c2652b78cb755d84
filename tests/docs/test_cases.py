"""Every numbered case of docs/cases.md is decided, and has a test that carries its number."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NUMBERS = {"CFG": 33, "OUT": 15, "RUN": 16, "PERF": 7, "API": 19, "SEC": 4}
CASES = [f"A-{kind}-{n:02}" for kind, count in NUMBERS.items() for n in range(1, count + 1)]
CASE = re.compile(r"A-(?:CFG|OUT|RUN|PERF|API|SEC)-\d\d")


def rows() -> dict[str, tuple[str, str]]:
    """What each case is and what happens, from the tables."""
    found: dict[str, tuple[str, str]] = {}
    for line in (REPOSITORY / "docs/cases.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and CASE.fullmatch(cells[0]):
            assert cells[0] not in found, f"{cells[0]} stands there twice"
            found[cells[0]] = (cells[1], cells[2])
    return found


def named_by(path: Path) -> Iterator[str]:
    """The cases that the tests of a file name, in a test's name or docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("test_"):
                continue
            yield from CASE.findall(ast.get_docstring(node) or "")
            yield from CASE.findall(node.name.upper().replace("_", "-"))


def test_every_case_is_decided_in_the_order_of_its_number() -> None:
    assert len(CASES) == 94 and list(rows()) == CASES
    assert all(what and here for what, here in rows().values())


def test_every_case_has_a_test() -> None:
    own = Path(__file__)
    files = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if path != own]
    tested = {case for path in files for case in named_by(path)}
    assert tested <= set(CASES), f"no such case: {sorted(tested - set(CASES))}"
    assert not set(CASES) - tested, f"without a test: {sorted(set(CASES) - tested)}"
