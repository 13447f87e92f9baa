"""The driver's image, made without an engine or a registry: Debian's Python, the locked dependencies, railmate.

Three layers, each an artefact of its own, so that a change of the code makes only the last one anew:
    base        python3 and the libraries it needs, unpacked from the machine's own distribution; no shell, no apt
    packages    driver/requirements.lock, as wheels                         /usr/lib/railmate/packages
    own         railmate, railmate_api, the gate and the probe              /usr/lib/railmate/own, /usr/libexec/railmate
driver/Containerfile makes an image of the same layout with an engine.
"""

from __future__ import annotations

import configparser
import os
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import debian
from harness.cache import artefact, content_key, log_file
from harness.ociimage import write_image
from harness.shell import HarnessError, main_guard, need, run

REPOSITORY = "railmate.local/railmate"
ROOT = Path(__file__).resolve().parents[2]

# grpcio's wheels link libstdc++; everything else they need comes with Python.
_BASE_PACKAGES = ("python3", "libstdc++6")
# What a program without a terminal, a display or a documentation viewer never reads. Relative to the root.
_BASE_UNUSED = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/lintian",
    "usr/share/bash-completion",
    "usr/share/pixmaps",
    "usr/share/applications",
    "usr/share/zoneinfo",
    "usr/share/terminfo",
    "usr/share/perl5",
    "usr/lib/*/gconv",
    "lib/*/gconv",
    "usr/lib/*/perl-base",
    "var/cache",
    "var/lib/apt",
    "var/lib/dpkg",
    "var/log",
    "etc/apt",
    "usr/lib/apt",
    "usr/lib/python3.*/test",
    "usr/lib/python3.*/idlelib",
    "usr/lib/python3.*/lib2to3",
    "usr/lib/python3.*/pydoc_data",
    "usr/lib/python3.*/ensurepip",
    "usr/lib/python3.*/turtledemo",
    "usr/lib/python3.*/config-3.*",
]
# Modules that are loaded on use, which is never: one for each type and group of the API. Not worth their compiled size.
_PACKAGES_UNCOMPILED = r"/kubernetes/client/(models|api)/[^_]"
# The asyncio copy of the API client is 68 MiB that nothing of the synchronous one imports.
_PACKAGES_UNUSED = ("bin", "kubernetes/aio")
_PACKAGES_DIR = "usr/lib/railmate/packages"
_OWN_DIR = "usr/lib/railmate/own"
_LIBEXEC_DIR = "usr/libexec/railmate"
_STATIC_PROGRAMS = ("gate", "probe")
# What the image is made of, beside the lock of its dependencies. hatchling makes the wheel of all but gate and probe.
_SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "api/build_hook.py",
    "api/railmate_api",
    "driver/railmate",
    "driver/requirements.lock",
    "driver/gate",
    "driver/probe",
)
_ENVIRONMENT = {
    "PATH": f"/{_OWN_DIR}/bin:/usr/bin:/bin",
    "PYTHONPATH": f"/{_OWN_DIR}:/{_PACKAGES_DIR}",
    "PYTHONDONTWRITEBYTECODE": "1",  # compiled when the image is made; the root file system is read-only later
    "PYTHONUNBUFFERED": "1",
    "LANG": "C.UTF-8",
}


@dataclass(frozen=True)
class DriverImage:
    """A finished image: `ref` is its name and tag, `archive` what `kind load image-archive` reads."""

    ref: str
    archive: Path
    layers: dict[str, Path]  # name -> tree

    @property
    def tag(self) -> str:
        return self.ref.rpartition(":")[2]

    def sizes(self) -> dict[str, int]:
        """Bytes of each layer's files."""
        return {name: _tree_size(path) for name, path in self.layers.items()}


def build() -> DriverImage:
    """The image of the tree as it is now. Raises HarnessError that names what is missing or went wrong.

    Made from packages by root on Debian and Ubuntu, by the machine's engine from driver/Containerfile elsewhere.
    """
    missing = [name for name in _SOURCES if not (ROOT / name).exists()]
    if missing:
        raise HarnessError(
            f"the driver's image needs {', '.join(missing)} from the tree; restore what is missing"
        )
    return _from_packages() if os.geteuid() == 0 and _has_packages() else _with_engine()


def _has_packages() -> bool:
    try:
        debian.distribution()
    except HarnessError:
        return False
    return True


def _with_engine() -> DriverImage:
    containerfile = ROOT / "driver/Containerfile"
    key = content_key(containerfile, *_source_parts())
    ref = f"{REPOSITORY}:{key}"
    docker = need("docker", "docker.io")

    def make(directory: Path) -> None:
        run([docker, "build", "--file", containerfile, "--tag", ref, ROOT], log=log_file("driver-image"))
        run([docker, "save", "--output", directory / "image.tar", ref])

    return DriverImage(
        ref, artefact("driver-image", key, make, "building driver/Containerfile") / "image.tar", {}
    )


def _from_packages() -> DriverImage:
    base = _base_layer()
    layers = {"base": base, "packages": _packages_layer(base), "own": _own_layer(base)}
    key = content_key(*(path.parent.name for path in layers.values()), Path(__file__))
    ref = f"{REPOSITORY}:{key}"

    def make(directory: Path) -> None:
        # Not compressed: it is read once, on this machine.
        write_image(
            directory / "image.tar",
            ref,
            list(layers.values()),
            ["railmate"],
            _ENVIRONMENT,
            cmd=["node"],
            compress=False,
        )

    return DriverImage(ref, artefact("driver-image", key, make, "writing the archive") / "image.tar", layers)


def _base_layer() -> Path:
    system = debian.distribution()
    key = content_key(system.codename, platform.machine(), *_BASE_PACKAGES, *_BASE_UNUSED)

    def make(directory: Path) -> None:
        tools = debian.unpacked("mmdebstrap", ("mmdebstrap",))
        root = directory / "root"
        run(
            ["mmdebstrap", "--quiet", "--mode=root", "--variant=extract", f"--keyring={system.keyring}",
             f"--components={system.components}", f"--include={','.join(_BASE_PACKAGES)}",
             '--aptopt=APT::Install-Recommends "false"', system.codename, root, system.mirror],
            env=tools.environment(),
        )  # fmt: skip
        for pattern in _BASE_UNUSED:
            _remove(*root.glob(pattern))
        _remove(*root.glob("dev/*"))
        for name, text in (
            ("etc/passwd", "root:x:0:0:root:/root:/usr/sbin/nologin\n"),
            ("etc/group", "root:x:0:\n"),
            ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
        ):
            (root / name).write_text(text)
        # Mount points must exist where the root file system is read-only.
        for name in ("run", "tmp", "root", "var/run"):
            if not os.path.lexists(root / name):
                (root / name).mkdir(parents=True)
        _compile(root, root / "usr/lib", "/usr/lib")

    return artefact("driver-base", key, make, "unpacking Python from the distribution's packages") / "root"


def _packages_layer(base: Path) -> Path:
    lock = ROOT / "driver/requirements.lock"
    version = _python_version(base)

    def make(directory: Path) -> None:
        target = directory / "root" / _PACKAGES_DIR
        target.mkdir(parents=True)
        run([
            sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--require-hashes",
            "--only-binary=:all:", "--no-compile", "--implementation=cp", f"--python-version={version}",
            f"--target={target}", "--requirement", lock,
        ])  # fmt: skip
        for name in _PACKAGES_UNUSED:
            _remove(target / name)
        _remove(*(path for path in target.rglob("tests") if path.is_dir()))
        _remove(*target.rglob("*.pyi"))
        _strip(target)
        _compile(base, target, f"/{_PACKAGES_DIR}", _PACKAGES_UNCOMPILED)

    key = content_key(base.parent.name, lock, *_PACKAGES_UNUSED, _PACKAGES_UNCOMPILED)
    return artefact("driver-packages", key, make, "fetching the locked dependencies") / "root"


def _own_layer(base: Path) -> Path:
    key = content_key(base.parent.name, *_source_parts())

    def make(directory: Path) -> None:
        own = directory / "root" / _OWN_DIR
        own.mkdir(parents=True)
        _install_wheel(_build_wheel(directory / "wheel"), own)
        shutil.rmtree(directory / "wheel")
        _compile(base, own, f"/{_OWN_DIR}")
        libexec = directory / "root" / _LIBEXEC_DIR
        libexec.mkdir(parents=True)
        for name in _STATIC_PROGRAMS:
            _build_static(sorted((ROOT / "driver" / name).glob("*.c")), libexec / name)

    return artefact("driver-own", key, make, "packing railmate") / "root"


def _source_parts() -> list[str | bytes | Path]:
    """What of the tree counts for the key: not what builds leave in it."""
    parts: list[str | bytes | Path] = []
    for source in (ROOT / name for name in _SOURCES):
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        for path in files:
            if "__pycache__" in path.parts or re.search(r"_pb2(_grpc)?\.pyi?$", path.name):
                continue
            if path.parent.name not in _STATIC_PROGRAMS or path.suffix in (".c", ".h"):
                parts += [str(path.relative_to(ROOT)), path]
    return parts


def _build_wheel(directory: Path) -> Path:
    # hatchling is in the bench's environment; going through pip would take twice as long.
    run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", directory], cwd=ROOT)
    return next(directory.glob("*.whl"))


def _install_wheel(wheel: Path, target: Path) -> None:
    """Unpacks a pure wheel and writes its console scripts, as an installer does."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    entry_points = configparser.ConfigParser(delimiters="=", interpolation=None)
    entry_points.read(next(target.glob("*.dist-info")) / "entry_points.txt")
    (target / "bin").mkdir()
    for name, place in entry_points["console_scripts"].items():
        module, _, function = place.partition(":")
        script = target / "bin" / name
        script.write_text(
            f"#!/usr/bin/python3\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
        )
        script.chmod(0o755)


def _build_static(sources: Sequence[Path], out: Path) -> None:
    if not sources:
        raise HarnessError(f"driver/{out.name} has no C source; restore it from the repository")
    run([need("gcc", "gcc libc6-dev"), "-std=gnu11", "-Os", "-Wall", "-static", "-s", "-o", out, *sources])


def _strip(tree: Path) -> None:
    """Takes debugging symbols out of shared libraries where binutils is there (gcc brings it)."""
    strip = shutil.which("strip")
    libraries = [path for path in tree.rglob("*.so*") if path.is_file() and not path.is_symlink()]
    if strip and libraries:
        run([strip, "--strip-debug", *libraries])


def _python_version(base: Path) -> str:
    """Version of the image's Python, as in 3.11."""
    versions = [
        match[1]
        for path in (base / "usr/bin").iterdir()
        if (match := re.fullmatch(r"python(3\.\d+)", path.name))
    ]
    if len(versions) != 1:
        raise HarnessError(
            f"{base}/usr/bin has {len(versions)} Pythons; delete driver-base-* in the cache and repeat"
        )
    return versions[0]


def _compile(base: Path, tree: Path, place: str, but: str = "^$") -> None:
    """Compiles a tree that will be at `place` with the image's own Python, except files whose path matches `but`.

    It is started through its own dynamic loader, so it needs nothing of this machine. The compiled files are taken
    as they are (unchecked hashes): the times of files in an image mean nothing.
    """
    loaders = [path for pattern in ("lib64/ld-linux*.so.*", "lib/ld-linux*.so.*", "usr/lib*/ld-linux*.so.*")
               for path in base.glob(pattern)]  # fmt: skip
    if not loaders:
        raise HarnessError(f"{base} has no dynamic loader; delete driver-base-* in the cache and repeat")
    triplet = debian.library_triplet()
    libraries = f"{base}/usr/lib/{triplet}:{base}/lib/{triplet}"
    python = base / f"usr/bin/python{_python_version(base)}"
    run(
        [loaders[0], "--library-path", libraries, python, "-s", "-m", "compileall", "-q", "-j", "2",
         "--invalidation-mode", "unchecked-hash", "-x", but, "-s", tree, "-p", place, tree],
        env={"PYTHONHOME": str(base / "usr"), "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""},
    )  # fmt: skip


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _tree_size(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_symlink() and path.is_file())


def _main(_arguments: Sequence[str]) -> int:
    image = build()
    for name, size in image.sizes().items():
        print(f"{name:10} {size / 2**20:7.1f} MiB")
    print(f"{'archive':10} {image.archive.stat().st_size / 2**20:7.1f} MiB  {image.archive}")
    print(image.ref)
    return 0


if __name__ == "__main__":
    main_guard(_main)
