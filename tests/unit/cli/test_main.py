"""The command line as a whole: exit codes, and one clear line for bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import railmate
from railmate.cli.main import main


def run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "railmate.cli.main", *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, **more},
    )  # fmt: skip


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Exit code and stderr, which must be one line without a traceback."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse's way out
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.count("\n") == 1, err
    return code, err


@pytest.mark.parametrize("command", ["topology", "slices"])
def test_missing_directory_is_bad_input(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = error_of(capsys, command, "--sysfs-root", tmp_path / "none")
    assert code == 2
    assert str(tmp_path / "none") in err


@pytest.mark.parametrize("command", ["topology", "slices"])
def test_file_in_place_of_a_directory_is_bad_input(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, _ = error_of(capsys, command, "--sysfs-root", tmp_path / "file")
    assert code == 2


@pytest.mark.parametrize("command", ["topology", "slices"])
def test_directory_without_pci_devices_is_bad_input(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sys").mkdir()
    code, err = error_of(capsys, command, "--sysfs-root", tmp_path / "sys")
    assert code == 2
    assert "bus/pci" in err


@pytest.mark.parametrize("command", ["topology", "slices"])
def test_malformed_tree_is_said_in_words(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entries that are no devices, loops, binary attributes, and nothing else: one line, never a traceback."""
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / "0000:00:00.0").symlink_to("../../../devices/gone")
    (devices / "0000:00:01.0").symlink_to("0000:00:01.0")
    (devices / "nonsense").mkdir()
    (devices / "0000:00:02.0").mkdir()
    (devices / "0000:00:02.0/class").write_bytes(b"\xff\xfe")
    code = main([command, "--sysfs-root", str(tmp_path / "sys"), "--proc-root", str(tmp_path)])
    _, err = capsys.readouterr()
    assert code == 2
    (line,) = err.splitlines()
    assert "not one PCI function can be read" in line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["slices", "--no-such-option"],
        ["slices", "-o", "xml"],
        ["topology", "-o", "xml"],
        ["node", "--log-level", "loud"],
        ["node", "--grace-period", "soon"],
        ["node", "--grace-period", "-1"],
    ],
)
def test_bad_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_version_and_help_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--version"],
        ["--help"],
        ["node", "--help"],
        ["slices", "--help"],
        ["topology", "--help"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert railmate.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--node-name", ""], "--node-name"),
        (["--driver-name", "Not A Name"], "--driver-name"),
        (["--gate-binary", "/nonexistent/gate"], "--gate-binary"),
        (["--kubeconfig", "/nonexistent/kubeconfig"], "/nonexistent/kubeconfig"),
    ],
)
def test_node_with_a_bad_setting_ends_with_one_line(
    more: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gate").touch()
    code, err = error_of(capsys, "node", "--node-name", "n", "--gate-binary", tmp_path / "gate", *more)
    assert code == 2
    assert named in err


def test_both_names_of_the_command_are_the_same_program() -> None:
    from importlib.metadata import entry_points

    found = {point.name: point.value for point in entry_points(group="console_scripts")}
    assert found["railmate"] == found["kubectl-railmate"]


def test_reader_that_has_seen_enough_is_no_error(machine_root: Callable[[str, int], Path]) -> None:
    root = machine_root("dgx-a100", 4)
    command = [sys.executable, "-m", "railmate.cli.main", "slices", "--sysfs-root", str(root / "sys")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 0
    assert err == b""


def test_offline_commands_need_neither_grpc_nor_a_cluster(tmp_path: Path) -> None:
    """They start quickly, and run where no cluster is."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['grpc'] = sys.modules['kubernetes'] = None\n"
    )
    done = run("slices", "--sysfs-root", tmp_path / "none", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_output_that_cannot_be_written_is_one_line(machine_root: Callable[[str, int], Path]) -> None:
    root = machine_root("aws-p4d", 0)
    command = [sys.executable, "-m", "railmate.cli.main", "topology", "--sysfs-root", str(root / "sys")]
    with Path("/dev/full").open("w") as full:
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # else nothing is left to fail at the end
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_output_that_the_terminal_cannot_show_is_one_line(machine_root: Callable[[str, int], Path]) -> None:
    root = machine_root("aws-p4d", 0)
    done = run("topology", "-o", "tree", "--sysfs-root", root / "sys", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "PYTHONIOENCODING=utf-8" in done.stderr
