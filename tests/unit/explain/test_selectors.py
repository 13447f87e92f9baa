"""CEL as the scheduler evaluates it: answers of the Go environment of Kubernetes 1.37 for the same expressions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from railmate.errors import UsageError
from railmate.explain.cel import Selectors, clauses
from railmate.explain.model import Capacity, Device

DEVICE = Device(
    "railmate.dev",
    "node",
    "gpu",
    attributes={
        "railmate.dev/kind": ("string", "gpu"),
        "numa": ("int", 0),  # without a domain: the driver's
        "railmate.dev/firmware": ("version", "1.10.3"),
        "railmate.dev/roots": ("strings", ("a", "b")),
    },
    capacity={"railmate.dev/memory": Capacity(80 * 2**30)},
)
OURS = 'device.attributes["railmate.dev"]'


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ('device.driver == "railmate.dev"', True),
        # an absent domain reads as an empty map, but is not in the map of domains
        ('"nope" in device.attributes', False),
        ('"railmate.dev" in device.attributes', True),
        ('device.attributes[?"nope"].hasValue()', True),
        ('has(device.attributes["nope"].x)', False),
        ('device.attributes["nope"].?x.orValue("") == ""', True),
        (f'{OURS}.?missing.orValue("") == ""', True),
        (f'"kind" in {OURS}', True),
        (f"{OURS}.numa == 0", True),
        (f"{OURS}.numa < 1.5", True),
        (f'{OURS}.kind.includes("gpu")', True),
        (f'{OURS}.roots.exists(r, r == "b")', True),
        (f'{OURS}.roots.includes("c")', False),
        (f'sets.intersects({OURS}.roots, ["a", "z"])', True),
        (f'{OURS}.kind in ["gpu", "pair"]', True),
        (f'{OURS}.kind.startsWith("g") && {OURS}.kind.matches("^g.u$")', True),
        (f'cel.bind(d, {OURS}, d.kind == "gpu" && d.numa == 0)', True),
        (f'{OURS}.firmware.isGreaterThan(semver("1.9.0"))', True),
        (f'{OURS}.firmware.compareTo(semver("1.10.3")) == 0', True),
        (f'{OURS}.firmware.isLessThan(semver("v2.0", true))', True),
        ('device.capacity["railmate.dev"].memory.compareTo(quantity("80Gi")) == 0', True),
        ('device.capacity["railmate.dev"].memory.isLessThan(quantity("79G"))', False),
        ('device.capacity["railmate.dev"].memory == quantity("81920Mi")', True),
        ("device.allowMultipleAllocations", False),
        # an error that another operand makes irrelevant is none
        (f'{OURS}.missing == "a" || true', True),
    ],
)  # fmt: skip
def test_expression_has_the_answer_that_the_scheduler_finds(expression: str, answer: bool) -> None:
    assert Selectors().matches(expression, DEVICE) is answer


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (f'{OURS}.missing == "a"', "no such key: missing"),
        ('device.attributes["nope"].x == 1', "no such key: x"),
        (f"{OURS}.kind", "of type string, not bool"),
        (f'{OURS}.numa > "x"', "No matching overload"),
        ('quantity("much").isInteger()', "is no quantity"),
    ],
)
def test_error_of_an_expression_is_an_answer_with_its_words(expression: str, words: str) -> None:
    answer = Selectors().matches(expression, DEVICE)
    assert isinstance(answer, str)
    assert words in answer


def test_expression_that_cannot_be_evaluated_here_is_refused_and_not_guessed_at() -> None:
    with pytest.raises(UsageError, match=r"cannot be evaluated here.*leave the selector out"):
        Selectors().check('ip("10.0.0.1").family() == 4')


@pytest.mark.parametrize(
    ("expression", "parts"),
    [
        ("a", ["a"]),
        ("a && b&&c", ["a", "b", "c"]),
        ("(a && b) && c", ["(a && b)", "c"]),
        ("a && b || c", ["a && b || c"]),
        ("a ? b && c : d", ["a ? b && c : d"]),
        ('x == "p && q" && y', ['x == "p && q"', "y"]),
        ("a.?b.orValue(false) && c[?'d'].hasValue()", ["a.?b.orValue(false)", "c[?'d'].hasValue()"]),
    ],
)
def test_clauses_are_what_top_level_ands_join(expression: str, parts: list[str]) -> None:
    assert clauses(expression) == parts


def test_engine_is_loaded_by_the_first_expression_only() -> None:
    """It has 50 MB; the node plugin and most commands never need it, nor the API client."""
    looked_at = (
        "import sys, railmate.cli.main as m; m._parser(); import railmate.explain.verdict, railmate.compose.check; "
        "print([x for x in ('cel_expr_python', 'kubernetes', 'grpc') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", looked_at], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_engine_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    with pytest.raises(UsageError, match=r"pip install 'railmate\[explain\]'"):
        Selectors().check("true")
