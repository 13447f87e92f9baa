"""A containerd store that is filled with images before any node uses it."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.cache import log_file
from harness.process import start
from harness.shell import HarnessError, run, tail


def import_images(
    store: Path, archives: Sequence[Path], binaries: Mapping[str, Path], log: str, start_seconds: float, *,
    inside: Sequence[str | Path] = (), options: Sequence[str] = (),
) -> None:  # fmt: skip
    """Puts images into the store, by a containerd of our own that must answer within ``start_seconds``.

    ``log`` names its log in the cache, ``inside`` is the command that runs it, ``options`` are of `ctr images import`.
    Raises HarnessError with the end of the log.
    """
    with tempfile.TemporaryDirectory(prefix="railmate-store-") as scratch:
        state, told = Path(scratch), log_file(log)
        configuration = state / "config.toml"
        configuration.write_text(_configuration(store, state))
        containerd = start(
            [*inside, binaries["containerd"], "-c", configuration], told
        )  # it must not outlive us
        try:
            ctr: list[str | Path] = [binaries["ctr"], "-a", state / "containerd.sock", "-n", "k8s.io"]
            _await(containerd, [*ctr, "version"], told, start_seconds)
            for archive in archives:
                # Pinned: the kubelet's image garbage collection leaves them alone.
                pinned = ("--label", "io.cri-containerd.pinned=pinned")
                run([*ctr, "images", "import", *pinned, *options, archive])
        finally:
            containerd.terminate()
            containerd.wait()


def _configuration(store: Path, state: Path) -> str:
    # Plugins that touch the machine (CNI, NRI, /opt) have no part in importing.
    disabled = [
        f"io.containerd.{name}"
        for name in ("cri.v1.runtime", "cri.v1.images", "grpc.v1.cri", "nri.v1.nri", "internal.v1.opt")
    ]
    return (
        f"version = 3\nroot = {json.dumps(str(store))}\nstate = {json.dumps(str(state / 'state'))}\n"
        f"imports = []\ndisabled_plugins = {json.dumps(disabled)}\n"
        f"[grpc]\naddress = {json.dumps(str(state / 'containerd.sock'))}\n"
        f"[ttrpc]\naddress = {json.dumps(str(state / 'containerd.sock.ttrpc'))}\n"
    )


def _await(containerd: subprocess.Popen[bytes], check: list[str | Path], log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        if containerd.poll() is not None or time.monotonic() > deadline:
            raise HarnessError(
                f"containerd, started to import images, does not answer; end of {log}:\n{tail(log)}"
            )
        try:
            run(check)
            return
        except HarnessError:
            time.sleep(0.1)
