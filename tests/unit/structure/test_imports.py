"""The house's order: a package imports only what stands below it, so that a change has one direction to spread in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3] / "driver" / "railmate"
#: Top to bottom; the single modules below all packages last.
ORDER = [
    *(
        "cli",
        "node",
        "kubelet",
        "nri",
        "health",
        "compose",
        "explain",
        "claims",
        "provision",
        "attach",
        "cdi",
    ),
    *("publish", "topology", "inventory", "kube"),
    *("plain", "strictyaml", "files", "netlink", "errors"),
]
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
#: Changes of the kernel stay in one place: what can make them is imported nowhere else.
KERNEL = {"pyroute2": set(), "railmate.netlink": {"attach", "inventory"}}
#: What makes threads, by its last name: of threading, concurrent.futures, asyncio, _thread.
THREADS = {
    *("Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "to_thread"),
    *("start_new_thread", "start_joinable_thread"),
}
#: Below node, and why: a thread that ends before the call does, because a network namespace is a thread's own; threads
#: of the kubelet's server, which belong to it as its sockets do, and end with it.
THREADS_ALLOWED = {Path("attach/namespaces.py"), Path("kubelet/workers.py")}


def place(file: Path) -> str:
    return file.parts[0] if len(file.parts) > 1 else file.stem


def imported(file: Path) -> Iterator[str]:
    """Dotted names of modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_package_has_its_place() -> None:
    assert {place(file) for file in FILES} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_lead_downwards(file: Path) -> None:
    own = place(file)
    if own == "__init__":
        return
    others = {name.split(".")[1] for name in imported(file) if name.startswith("railmate.")} & set(ORDER) - {
        own
    }
    assert [other for other in others if ORDER.index(other) < ORDER.index(own)] == []


def test_the_kernel_is_changed_in_one_place() -> None:
    for module, allowed in KERNEL.items():
        users = {
            place(file)
            for file in FILES
            if any(f"{name}.".startswith(f"{module}.") for name in imported(file))
        }
        assert users <= allowed, module


def makes_threads(text: str) -> bool:
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    return not names.isdisjoint(THREADS)


def test_nothing_below_node_starts_threads() -> None:
    below = [file for file in FILES if place(file) not in ("cli", "node", "__init__")]
    found = {file for file in below if makes_threads((ROOT / file).read_text())}
    assert found == THREADS_ALLOWED


@pytest.mark.parametrize(
    "text", ["threading.Thread(target=f)", "Thread(target=f).start()", "futures.ThreadPoolExecutor(4)"]
)
def test_threads_are_seen_however_they_are_made(text: str) -> None:
    assert makes_threads(text)
    assert not makes_threads("lock = threading.Lock()")
