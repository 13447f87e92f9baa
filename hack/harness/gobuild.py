"""Go programs of the bench, built from the pinned modules under hack/tools into the cache.

Each program is an artefact of its own, keyed by go.mod, go.sum, flags and the Go version, so a build that broke
off goes on where it was. Go's build cache is shared by all of them.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import debian
from harness.cache import artefact, cache_dir, content_key, find_artefact, log_file
from harness.shell import HarnessError, need, run

TOOLS = Path(__file__).resolve().parent.parent / "tools"
KUBERNETES_VERSION = "v1.37.2"  # k8s.io/kubernetes in hack/tools/kubernetes/go.mod
CNI_PLUGINS = ("bridge", "host-device", "host-local", "loopback", "macvlan", "static")

# What `go build` is told by Kubernetes' own build, as far as version output and version skew checks need it.
_KUBERNETES_STAMP = " ".join(
    f"-X {package}.{name}={value}"
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for name, value in (
        ("gitVersion", KUBERNETES_VERSION),
        ("gitMajor", "1"),
        ("gitMinor", "37"),
        ("gitTreeState", "clean"),
        ("gitCommit", "none"),
    )
)
# Snapshotters and documentation that nothing here uses.
_CONTAINERD_TAGS = "no_btrfs no_devmapper no_zfs no_aufs urfave_cli_no_docs"


@dataclass(frozen=True)
class Program:
    """One Go program: where it is pinned and how it is built. `cost`: rough cold build time in seconds."""

    name: str
    family: str  # directory under hack/tools
    package: str
    cost: int
    tags: str = ""
    stamp: str = ""
    cgo: bool = False

    @property
    def module_dir(self) -> Path:
        return TOOLS / self.family


def _programs() -> Iterable[Program]:
    for name, cost in (
        ("kube-apiserver", 400),
        ("kube-scheduler", 60),
        ("kube-controller-manager", 130),
        ("kubelet", 120),
        ("kubeadm", 30),
        ("kubectl", 40),
        ("kube-proxy", 20),
    ):
        package = f"k8s.io/kubernetes/cmd/{name}"
        yield Program(name, "kubernetes", package, cost, stamp=_KUBERNETES_STAMP)
    yield Program("allocate", "kubernetes", "./allocate", 40)
    yield Program("etcd", "runtime", "go.etcd.io/etcd/server/v3", 70)
    for name, cost in (("containerd", 120), ("containerd-shim-runc-v2", 20), ("ctr", 30)):
        package = f"github.com/containerd/containerd/v2/cmd/{name}"
        yield Program(name, "runtime", package, cost, tags=_CONTAINERD_TAGS)
    yield Program("crictl", "runtime", "sigs.k8s.io/cri-tools/cmd/crictl", 50)
    yield Program("runc", "runtime", "github.com/opencontainers/runc", 25, tags="seccomp", cgo=True)
    for name in CNI_PLUGINS:
        kind = "ipam" if name in ("host-local", "static") else "main"
        yield Program(name, "runtime", f"github.com/containernetworking/plugins/plugins/{kind}/{name}", 5)
    yield Program("kind", "kind", "sigs.k8s.io/kind", 20)
    yield Program("helm", "helm", "helm.sh/helm/v4/cmd/helm", 60)
    yield Program("coredns", "coredns", "./coredns", 90)
    # Two families: Kueue needs a newer controller-runtime than the other two can be built with.
    yield Program("kueue", "kueue", "sigs.k8s.io/kueue/cmd/kueue", 180)
    yield Program("mpi-operator", "kueue", "github.com/kubeflow/mpi-operator/cmd/mpi-operator", 30)
    yield Program("jobset", "jobset", "sigs.k8s.io/jobset", 90)
    yield Program("lws", "jobset", "sigs.k8s.io/lws/cmd", 30)
    # One of its own: it is built with the client libraries of an older Kubernetes, and only long tests want it.
    yield Program("whereabouts", "whereabouts", "github.com/k8snetworkplumbingwg/whereabouts/cmd", 90)
    yield Program("pause", "bench", "./pause", 2)
    yield Program("runc-within-bounds", "bench", "./runc-within-bounds", 2)


PROGRAMS = {program.name: program for program in _programs()}
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")


def build_order(names: Iterable[str]) -> list[Program]:
    """The programs, longest build first, those of the control plane before all others (component tests need them).

    Raises HarnessError for a name that is not in PROGRAMS.
    """
    chosen = []
    for name in dict.fromkeys(names):
        if name not in PROGRAMS:
            raise HarnessError(f"no Go program {name!r}; known: {', '.join(sorted(PROGRAMS))}")
        chosen.append(PROGRAMS[name])
    return sorted(chosen, key=lambda program: (program.name not in CONTROL_PLANE, -program.cost))


def build(names: Iterable[str]) -> dict[str, Path]:
    """Builds what is not in the cache yet; the path of each program.

    Raises HarnessError with the log's end when a build fails, or that names a missing tool and its package.
    """
    return {item.name: _build(item) for item in build_order(names)}


def program(name: str) -> Path:
    """Path of one program, built if need be."""
    return build([name])[name]


def built(name: str) -> Path | None:
    """Path of one program if it is in the cache; never builds and needs no Go to answer no."""
    if shutil.which("go") is None:
        return None
    item = PROGRAMS[name]
    found = find_artefact(item.name, program_key(item, go_version(item.module_dir)))
    return None if found is None else found / item.name


def bin_dir(names: Iterable[str]) -> Path:
    """A directory with the programs under their own names, for PATH."""
    paths = build(names)

    def link(directory: Path) -> None:
        for name, path in paths.items():
            (directory / name).symlink_to(path)

    return artefact("bin", content_key(*(str(path) for path in paths.values())), link, "linking")


def program_key(item: Program, version: str) -> str:
    """Key of a program built with Go of that version."""
    sources: list[str | bytes | Path] = [item.module_dir / "go.mod", item.module_dir / "go.sum"]
    if item.package.startswith("."):
        sources.append(item.module_dir / item.package)
    return content_key(version, *sources, *go_arguments(item), str(item.cgo))


def go_arguments(item: Program) -> list[str]:
    """Arguments of `go build` other than the output and the package."""
    return [
        "-trimpath",
        *(["-tags", item.tags] if item.tags else []),
        "-ldflags",
        f"-s -w {item.stamp}".strip(),
    ]


def module_source(family: str, module: str) -> Path:
    """Directory in Go's module cache that holds the source of a module pinned by hack/tools/<family>."""
    run(["go", "mod", "download", module], cwd=TOOLS / family, env=go_environment())
    listed = run(["go", "list", "-m", "-f", "{{.Dir}}", module], cwd=TOOLS / family, env=go_environment())
    return Path(listed.strip())


def go_environment(cgo: bool = False) -> dict[str, str]:
    """Environment of every Go command here: caches below RAILMATE_CACHE, writable so that they can be deleted."""
    return {
        "GOCACHE": str(cache_dir() / "go-build"),
        "GOMODCACHE": str(cache_dir() / "go-mod"),
        "GOFLAGS": "-modcacherw",
        "GOWORK": "off",
        "CGO_ENABLED": "1" if cgo else "0",
    }


@functools.cache
def go_version(module_dir: Path) -> str:
    """Version of Go that builds a module (a newer toolchain than the installed one is fetched by Go itself)."""
    go = shutil.which("go")
    if go is None:
        raise HarnessError(
            "go is missing; install Go 1.21 or newer (Debian 13, Ubuntu 24.04 and later: apt-get install golang-go; "
            "elsewhere from go.dev/dl), or start a Docker engine, then no Go is needed for the cluster"
        )
    environment = {**os.environ, **go_environment(), "GOTOOLCHAIN": "local"}
    local = subprocess.run(
        [go, "env", "GOVERSION"], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    number = re.match(r"go1\.(\d+)", local.stdout)
    if number is None or int(number[1]) < 21:
        raise HarnessError(
            f"{go} is {local.stdout.strip() or 'not usable'}, Go 1.21 or newer is needed to fetch the toolchain that "
            "go.mod asks for; install it from go.dev/dl or your distribution's backports"
        )
    return run([go, "env", "GOVERSION"], cwd=module_dir, env=go_environment()).strip()


def _build(item: Program) -> Path:
    key = program_key(item, go_version(item.module_dir))

    def make(directory: Path) -> None:
        environment = go_environment(item.cgo) | (_c_environment() if item.cgo else {})
        command: list[str | Path] = [
            "nice",
            "go",
            "build",
            *go_arguments(item),
            "-o",
            directory / item.name,
            item.package,
        ]
        run(command, cwd=item.module_dir, env=environment, log=log_file(f"go-{item.name}"))

    doing = (
        f"building (about {item.cost} s on two cores when nothing is cached)"
        if item.cost > 30
        else "building"
    )
    return artefact(item.name, key, make, doing) / item.name


def _c_environment() -> dict[str, str]:
    """What building runc, which is C in part, needs: a compiler of the machine, and libseccomp's headers.

    Headers that are not installed are unpacked into the cache; the library is then linked into the program.
    """
    need("gcc", "gcc libc6-dev")
    if (
        shutil.which("pkg-config")
        and not subprocess.run(["pkg-config", "--exists", "libseccomp"], check=False).returncode
    ):
        return {}
    headers = debian.unpacked("libseccomp", ("libseccomp-dev", "pkg-config"))
    libraries = headers.root / "usr/lib" / debian.library_triplet()
    tools = headers.environment()
    return {
        "PATH": f"{os.environ['PATH']}:{tools['PATH']}",
        "LD_LIBRARY_PATH": tools["LD_LIBRARY_PATH"],
        "PKG_CONFIG_PATH": str(libraries / "pkgconfig"),
        "CGO_CFLAGS": f"-I{headers.root}/usr/include",
        "CGO_LDFLAGS": f"-L{libraries}",
    }
