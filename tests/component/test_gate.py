"""The attach gate: compiled with the system's compiler and fed container states as a runtime would."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

GATE_SOURCES = Path(__file__).parents[2] / "driver" / "gate"
CLAIM = "4f3c1c0e-6a55-4c38-9d4a-1e2b7f0d5a11"
SANDBOX = "0f" * 32
CONTAINERD_KEY = "io.kubernetes.cri.sandbox-id"
CRIO_KEY = "io.kubernetes.cri-o.SandboxID"

Gate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def gate_executable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gate")
    for source in (*GATE_SOURCES.glob("*.[ch]"), GATE_SOURCES / "Makefile"):
        shutil.copy(source, directory)
    done = subprocess.run(
        ["make", "-C", directory, "CFLAGS=-Os -Wall -Wextra -Werror"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return directory / "gate"


@pytest.fixture
def attached(tmp_path: Path) -> Path:
    directory = tmp_path / "attached"
    directory.mkdir()
    return directory


@pytest.fixture
def gate(gate_executable: Path, attached: Path) -> Gate:
    def run(
        state: str | bytes, *arguments: str, directory: Path = attached
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [gate_executable, directory, *(arguments or (CLAIM,))],
            input=state.encode() if isinstance(state, str) else state,
            capture_output=True,
            timeout=10,
            env={},
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run


NO_PROCESS = 1 << 22  # the highest number that pid_max allows is one less
CAP_SYS_RESOURCE = 24


def state(sandbox: str = SANDBOX, key: str = CONTAINERD_KEY, process: int = NO_PROCESS, **more: str) -> str:
    """A state as runc hands it to a hook."""
    return json.dumps(
        {
            "ociVersion": "1.3.0",
            "id": "ab" * 32,
            "status": "creating",
            "pid": process,
            "bundle": "/run/containerd/io.containerd.runtime.v2.task/k8s.io/x",
            "annotations": {"io.kubernetes.cri.container-type": "container", key: sandbox, **more},
        }
    )


def attach(directory: Path, sandbox: str = SANDBOX, claim: str = CLAIM) -> None:
    (directory / f"{claim}.{sandbox}").touch()


def is_static(executable: Path) -> bool:
    """Whether the program has no interpreter (dynamic loader): no PT_INTERP header, ELF64."""
    image = executable.read_bytes()
    offset = int.from_bytes(image[32:40], "little")
    size, count = int.from_bytes(image[54:56], "little"), int.from_bytes(image[56:58], "little")
    types = [int.from_bytes(image[offset + i * size : offset + i * size + 4], "little") for i in range(count)]
    return 3 not in types


def test_the_gate_needs_no_library_of_the_host(gate_executable: Path) -> None:
    assert is_static(gate_executable)
    assert not is_static(Path(os.path.realpath("/bin/sh"))), (
        "the check itself would not see a dynamic program"
    )


@pytest.mark.parametrize("key", [CONTAINERD_KEY, CRIO_KEY])
def test_a_container_of_the_sandbox_that_holds_the_devices_starts(
    gate: Gate, attached: Path, key: str
) -> None:
    attach(attached)
    done = gate(state(key=key))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_container_starts_again_and_again(gate: Gate, attached: Path) -> None:
    attach(attached)
    assert [gate(state()).returncode for _ in range(3)] == [0, 0, 0]


def test_without_attached_devices_the_container_is_refused_with_a_sentence_for_the_user(gate: Gate) -> None:
    done = gate(state())
    assert done.returncode == 1
    assert done.stderr == (
        f"railmate.dev: the network device of claim {CLAIM} is not attached to this pod yet "
        "(sandbox 0f0f0f0f0f0f): the railmate plugin on this node is not connected to the container runtime; "
        "the container starts by itself once it is. See the railmate pod's log on this node.\n"
    )


def test_the_message_carries_the_drivers_name(gate: Gate) -> None:
    assert gate(state(), CLAIM, "rails.example").stderr.startswith("rails.example: the network device")


def test_a_new_sandbox_of_the_same_pod_is_refused(gate: Gate, attached: Path) -> None:
    attach(attached)
    assert gate(state(sandbox="1e" * 32)).returncode == 1


def test_another_claim_of_the_same_sandbox_does_not_open_the_gate(gate: Gate, attached: Path) -> None:
    attach(attached, claim="another-claim")
    assert gate(state()).returncode == 1


@pytest.mark.parametrize(
    ("marker", "starts"),
    [("\nabc", True), ("\nabd", False), ("\nabcd", False), ("", False), ("\n" + "a" * 500, False)],
)
def test_a_container_that_was_made_with_other_device_nodes_is_refused(
    gate: Gate, attached: Path, marker: str, starts: bool
) -> None:
    """The runtime has read the claim's CDI spec before its RDMA device moved."""
    (attached / f"{CLAIM}.{SANDBOX}").write_text(marker)
    done = gate(state(), CLAIM, "railmate.dev", "abc")
    assert done.returncode == (0 if starts else 1), done.stderr
    assert ("the device nodes of claim" in done.stderr) is not starts
    assert gate(state(), CLAIM, "railmate.dev").returncode == 0, "an earlier spec does not ask"


def test_a_pod_on_the_host_network_is_known_beside_its_device_nodes(gate: Gate, attached: Path) -> None:
    (attached / f"{CLAIM}.{SANDBOX}").write_text("host\nabc")
    assert gate(state(process=os.getpid()), CLAIM, "railmate.dev", "abc").returncode == 0
    assert gate(state(process=os.getpid()), CLAIM, "railmate.dev", "abd").returncode == 1
    assert "is not on the host network" in gate(state(), CLAIM, "railmate.dev", "abc").stderr


def test_a_missing_directory_keeps_the_gate_closed(gate: Gate, tmp_path: Path) -> None:
    done = gate(state(), directory=tmp_path / "never-made")
    assert done.returncode == 1
    assert "is not attached to this pod yet" in done.stderr


def test_only_a_regular_file_opens_the_gate(gate: Gate, attached: Path) -> None:
    (attached / f"{CLAIM}.{SANDBOX}").symlink_to("/etc/hostname")
    assert gate(state()).returncode == 1


@pytest.mark.parametrize(
    "malformed",
    [
        "",
        "null",
        "[]",
        '"text"',
        "{",
        state()[:-1],
        state()[:40],
        state() + "x",
        state() + state(),
        state().replace(": ", " ", 1),
        state().replace('"annotations": {', '"annotations": ['),
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"annotations": {"\\u00zz": "x"}}',
        '{"annotations": {"a\nb": "x"}}',
        '{"annotations": {"a\\',
        "\0" + state(),
        b"\xff\xfe" + state().encode(),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_a_malformed_state_keeps_the_gate_closed(gate: Gate, attached: Path, malformed: str | bytes) -> None:
    attach(attached)
    done = gate(malformed)
    assert done.returncode == 1
    assert done.stderr == "railmate.dev: the container runtime gave a malformed container state\n"


@pytest.mark.parametrize(
    "nameless",
    [
        "{}",
        '{"annotations": {}}',
        '{"annotations": null}',
        json.dumps({"annotations": {CONTAINERD_KEY: 7}}),
        json.dumps({"annotations": {CONTAINERD_KEY: ""}}),
        json.dumps({CONTAINERD_KEY: SANDBOX}),
        json.dumps({"annotations": {"nested": {CONTAINERD_KEY: SANDBOX}}}),
        json.dumps({"x": {"annotations": {CONTAINERD_KEY: SANDBOX}}}),
        json.dumps({"annotations": [{CONTAINERD_KEY: SANDBOX}]}),
        json.dumps({"annotations": {"note": f'"{CONTAINERD_KEY}":"{SANDBOX}"'}}),
        json.dumps({"annotations": {f'x","{CONTAINERD_KEY}': SANDBOX}}),
    ],
)
def test_only_the_states_own_annotation_names_the_sandbox(gate: Gate, attached: Path, nameless: str) -> None:
    attach(attached)
    done = gate(nameless)
    assert done.returncode == 1
    assert "does not name its pod sandbox" in done.stderr


@pytest.mark.parametrize(
    "sandbox",
    ["../" + CLAIM, "a/b", "..", ".", "a.b", "a b", "a\0b", "ä" * 8, "x" * 129, SANDBOX + "\n", "%s%n"],
    ids=repr,
)
def test_an_id_that_is_none_never_reaches_the_file_system(gate: Gate, attached: Path, sandbox: str) -> None:
    attach(attached)
    attach(attached, claim=f"{CLAIM}.x")
    done = gate(state(sandbox=sandbox))
    assert done.returncode == 1
    assert "names its pod sandbox in an unusable way" in done.stderr


@pytest.mark.parametrize("claim", ["../x", "", "a/b", "a.b", "x" * 129])
def test_a_claim_uid_that_is_none_is_refused(gate: Gate, claim: str) -> None:
    done = gate(state(), claim)
    assert done.returncode == 1
    assert "malformed claim UID" in done.stderr


def test_escapes_in_the_state_mean_what_json_says(gate: Gate, attached: Path) -> None:
    attach(attached)
    key = CONTAINERD_KEY.replace("-", "\\u002d").replace("cri", "\\u0063r\\u0069")
    escaped = SANDBOX.replace("0f", "\\u0030\\u0066", 3)
    text = f'{{"annotations": {{"quote": "\\"}}{{", "{key}": "{escaped}", "tail": "\\\\"}}}}'
    assert json.loads(text)["annotations"][CONTAINERD_KEY] == SANDBOX
    assert gate(text).returncode == 0


def test_two_different_sandbox_ids_keep_the_gate_closed(gate: Gate, attached: Path) -> None:
    attach(attached)
    assert gate(state(**{CRIO_KEY: SANDBOX})).returncode == 0
    done = gate(state(**{CRIO_KEY: "1e" * 32}))
    assert done.returncode == 1
    assert "unusable" in done.stderr


def test_large_annotations_are_read(gate: Gate, attached: Path) -> None:
    attach(attached)
    assert gate(state(**{"aaa": "x" * 256 * 1024})).returncode == 0


def test_the_input_is_bounded(gate: Gate, attached: Path) -> None:
    attach(attached)
    done = gate(state(**{"aaa": "x" * (1 << 20)}))
    assert done.returncode == 1
    assert "more than 1048576 bytes" in done.stderr


def test_wrong_arguments_are_bad_usage(gate_executable: Path) -> None:
    done = subprocess.run([gate_executable], input="", capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage:" in done.stderr


# --- locked memory
@pytest.fixture
def container() -> Iterator[int]:
    """A process that may lock 64 KiB and could ask for twice as much, as a container's first one."""
    limits = (64 << 10, 128 << 10)
    process = subprocess.Popen(
        ["sleep", "60"], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def may_raise() -> bool:
    status = Path("/proc/self/status").read_text()
    (capabilities,) = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(capabilities, 16) >> CAP_SYS_RESOURCE & 1)


def left(attached: Path) -> list[str]:
    return [path.name for path in attached.parent.glob("memlock*")]


def test_a_container_that_starts_may_lock_memory_as_far_as_the_runtime_may_allow_it(
    gate: Gate, attached: Path, container: int
) -> None:
    """Without CAP_SYS_RESOURCE the hard limit stays, the soft one goes up to it, and the driver is told."""
    attach(attached)
    assert gate(state(process=container)).returncode == 0
    limits = resource.prlimit(container, resource.RLIMIT_MEMLOCK)
    if may_raise():
        assert (limits, left(attached)) == ((resource.RLIM_INFINITY,) * 2, ["memlock-raised"])
    else:
        assert (limits, left(attached)) == ((128 << 10, 128 << 10), ["memlock-refused"])


def test_what_the_driver_was_told_is_what_was_last_seen(gate: Gate, attached: Path, container: int) -> None:
    attach(attached)
    stale, fresh = ("refused", "raised") if may_raise() else ("raised", "refused")
    (attached.parent / f"memlock-{stale}").touch()
    gate(state(process=container))
    assert left(attached) == [f"memlock-{fresh}"]


def test_a_container_that_is_refused_gets_no_more_memory(gate: Gate, attached: Path, container: int) -> None:
    assert gate(state(process=container)).returncode == 1
    assert resource.prlimit(container, resource.RLIMIT_MEMLOCK)[0] == 64 << 10
    assert left(attached) == []


def test_a_process_that_has_ended_meanwhile_does_not_close_the_gate(gate: Gate, attached: Path) -> None:
    attach(attached)
    assert gate(state(process=NO_PROCESS)).returncode == 0
    assert left(attached) == []


# --- the rdma cgroup
DENIED = "railmate.dev/rdma-denied"
CONTAINER = "ab" * 32  # as in ``state``


@dataclass
class Cgroups:
    """Files that stand in for the kernel's, seen by the gate alone: its mount namespace has them over the real ones.
    The kernel's own answers are looked at in the virtual node (e2e/vnode/test_rdma_cgroup.py)."""

    gate: Path
    attached: Path
    process: int
    root: Path

    def limits(self, *place: str) -> Path:
        path = self.root.joinpath("cgroup", *place, "rdma.max")
        path.parent.mkdir(parents=True)
        path.touch()
        return path

    def run(self, memberships: str, denied: str = "mlx5_1 mlx5_4", container: str = CONTAINER) -> str:
        """What the gate has left word of, for a process with these memberships (cgroups(7), /proc/PID/cgroup)."""
        attach(self.attached)
        said = self.root / "memberships"
        said.write_text(memberships)
        (self.root / "cgroup").mkdir(exist_ok=True)
        mounts = f"mount --bind {self.root}/cgroup /sys/fs/cgroup && mount --bind {said} /proc/{self.process}/cgroup"
        text = json.loads(state(process=self.process, **{DENIED: denied}))
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", self.gate, self.attached, CLAIM],
            input=json.dumps({**text, "id": container}), capture_output=True, text=True, timeout=10,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), "the gate opens in any case"
        return " ".join(path.name for path in self.attached.parent.glob("rdma-*"))


@pytest.fixture
def cgroups(gate_executable: Path, attached: Path, container: int, tmp_path: Path) -> Cgroups:
    return Cgroups(gate_executable, attached, container, tmp_path)


_POD = "kubepods/burstable/pod1"
_NONE = "mlx5_1 hca_handle=0 hca_object=0\nmlx5_4 hca_handle=0 hca_object=0\n"


@pytest.mark.parametrize(
    ("memberships", "place"),
    [
        (f"0::/{_POD}/{CONTAINER}\n", (_POD, CONTAINER)),
        (f"0::/kubepods.slice/cri-{CONTAINER}.scope\n", ("kubepods.slice", f"cri-{CONTAINER}.scope")),
        (f"9:rdma:/{_POD}/{CONTAINER}\n0::/{_POD}/{CONTAINER}\n", ("rdma", _POD, CONTAINER)),
        (f"3:cpu,cpuacct:/{_POD}/{CONTAINER}\n0::/{_POD}/{CONTAINER}\n", ("unified", _POD, CONTAINER)),
    ],
    ids=["version 2", "systemd", "version 1", "both versions"],
)
def test_a_container_gets_nothing_of_the_rdma_devices_it_is_denied(
    cgroups: Cgroups, memberships: str, place: tuple[str, ...]
) -> None:
    limits = cgroups.limits(*place)
    assert cgroups.run(memberships) == "rdma-limited"
    assert limits.read_text() == _NONE


def test_without_the_controller_the_container_starts_and_the_driver_is_told(cgroups: Cgroups) -> None:
    (cgroups.attached.parent / "rdma-limited").touch()  # as on the last kernel
    assert cgroups.run(f"0::/{_POD}/{CONTAINER}\n") == "rdma-unlimited"


@pytest.mark.parametrize("place", ["/", f"/{_POD}", f"/../{CONTAINER}"])
def test_a_cgroup_that_is_not_the_containers_alone_is_left_alone(cgroups: Cgroups, place: str) -> None:
    """As of a process that was not put into one of its own, or whose cgroup is beyond this namespace."""
    limits = cgroups.limits(*place.strip("/").replace("..", "").split("/"))
    assert cgroups.run(f"0::{place}\n") == "rdma-unlimited"
    assert limits.read_text() == ""


def test_without_a_word_of_the_driver_nothing_is_limited(cgroups: Cgroups) -> None:
    limits = cgroups.limits(_POD, CONTAINER)
    assert cgroups.run(f"0::/{_POD}/{CONTAINER}\n", denied="") == ""
    assert limits.read_text() == ""


def test_more_names_than_the_gate_reads_limit_nothing(cgroups: Cgroups) -> None:
    """The last one could be cut off, and be another's name then."""
    limits = cgroups.limits(_POD, CONTAINER)
    assert cgroups.run(f"0::/{_POD}/{CONTAINER}\n", denied="mlx5_1 " * 10000) == ""
    assert limits.read_text() == ""
