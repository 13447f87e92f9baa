"""The slices are kept by the instance that registered last, as long as that lives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from railmate.node import instances as module
from railmate.node.agent import Agent
from railmate.node.instances import Instances


@contextmanager
def in_a_process_of_its_own(instances: Instances) -> Iterator[None]:
    """It registers, and is killed at the end."""
    ready, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            instances.registered()
            os.write(written, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(written)
    try:
        assert os.read(ready, 1) == b"."
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)


def files(plugin_dir: Path) -> list[str]:
    return [file.name for file in (plugin_dir / "instances").iterdir()]


def test_an_instance_is_outdone_by_one_that_registers_after_it_until_that_is_killed(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    assert not elder.outdone(), "nobody is beside it"
    with in_a_process_of_its_own(younger):
        assert elder.outdone()
        assert len(files(tmp_path)) == 2
    assert not elder.outdone()
    assert len(files(tmp_path)) == 1, "what the killed one left is removed"


def test_it_is_not_outdone_by_one_that_registered_before_it(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    with in_a_process_of_its_own(elder):
        younger.registered()
        assert not younger.outdone()
        assert len(files(tmp_path)) == 2, "the other's file stays while it lives"


def test_until_it_is_registered_it_leaves_the_slices_to_who_is(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    assert not younger.outdone(), "alone it publishes before the kubelet asks it"
    elder.registered()
    assert younger.outdone()


def test_whom_the_kubelet_registers_again_it_asks(tmp_path: Path) -> None:
    """After a restart of the kubelet, in any order."""
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    for one in (elder, younger, elder):
        one.registered()
    assert not elder.outdone()
    assert younger.outdone()
    assert len(files(tmp_path)) == 2


def test_one_that_ends_leaves_the_slices_to_the_other_before_its_process_ends(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    younger.registered()
    assert elder.outdone()
    child = os.fork()  # which has the lock's descriptor, too
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        younger.leave()
        younger.registered()  # as a call that was under way does
        assert not elder.outdone()
        assert len(files(tmp_path)) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_one_that_does_not_see_to_the_slices_any_more_keeps_them_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs, or whose slices the API server refuses, holds its lock and answers nobody."""
    monkeypatch.setattr(module, "_SILENT", 0.2)
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    younger.registered()
    assert elder.outdone()
    time.sleep(0.25)
    assert not elder.outdone()
    younger.kept()
    assert elder.outdone()


def test_what_instances_left_is_removed_when_another_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        with in_a_process_of_its_own(Instances(tmp_path)):
            pass
    (tmp_path / "instances/starting-1-1").touch()
    first = Instances(tmp_path)
    first.registered()
    first.leave()
    assert "starting-1-1" in files(tmp_path), "it may only just be made"
    monkeypatch.setattr(module, "_STARTED", 0)
    last = Instances(tmp_path)
    last.registered()
    assert len(files(tmp_path)) == 1


def test_strange_files_outdo_nobody(tmp_path: Path) -> None:
    (tmp_path / "instances").mkdir()
    (tmp_path / "instances/notes.txt").write_text("not ours")
    one = Instances(tmp_path)
    one.registered()
    assert not one.outdone()
    assert "notes.txt" in files(tmp_path)


def test_where_no_file_can_be_made_that_is_told_and_the_instance_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "instances").write_text("in the way")
    one = Instances(tmp_path)
    one.registered()
    assert "may write its own devices" in caplog.text
    assert not one.outdone()
    one.kept()
    one.leave()


def test_a_file_that_can_be_made_at_the_next_registration_is(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    (tmp_path / "instances").write_text("in the way")
    younger.registered()
    (tmp_path / "instances").unlink()
    elder.registered()
    younger.registered()
    assert elder.outdone()


def test_the_agent_offers_its_devices_again_when_the_kubelet_has_registered_it(tmp_path: Path) -> None:
    agent: Any = Agent.__new__(Agent)
    agent._instances = Instances(tmp_path)
    said: list[str] = []
    agent._offers = SimpleNamespace(repeat=lambda: said.append("again"))
    agent._on_registered(False)
    assert said == []
    agent._on_registered(True)
    assert said == ["again"]
    assert Instances(tmp_path).outdone()
