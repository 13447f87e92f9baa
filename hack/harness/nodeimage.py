"""The kind node image, built from Go modules and the machine's own packages: no registry is asked for anything."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import debian, gobuild, rootfs
from harness.cache import artefact, content_key, find_artefact
from harness.gobuild import CONTROL_PLANE, KUBERNETES_VERSION
from harness.imagestore import import_images
from harness.ociimage import tree_of_binaries, write_image
from harness.shell import HarnessError, progress, run

REPOSITORY = "railmate.local/node"
# What the manifests of examples and tests run. containerd completes the name when the archive is imported, as
# the kubelet does for a pod's image, so a plain `image: busybox:stable` finds it.
TEST_IMAGE = "busybox:stable"
_IMAGE_BINARIES = (*CONTROL_PLANE, "kube-proxy", "coredns", "pause")
_BINARIES = (*rootfs.BINARIES, *_IMAGE_BINARIES)
_START_SECONDS = 20


def build() -> tuple[Path, str]:
    """The archive for `docker load` and the image's name, built if need be.

    Packages and Go programs are fetched and built side by side: one waits for the network, the other computes.
    """
    source = debian.distribution()
    with ThreadPoolExecutor(max_workers=1) as pool:
        packages = pool.submit(rootfs.packages_tree, source)
        binaries = gobuild.build([*_BINARIES, "kind"])
        key = _key(binaries, source)
        tree = packages.result()
    directory = artefact("node-image", key, lambda path: _make(path, tree, binaries, key), "assembling")
    return directory / "node-image.tar", f"{REPOSITORY}:{key}"


def present() -> str | None:
    """The image's name if build() would return at once."""
    try:
        source = debian.distribution()
    except HarnessError:
        return None
    binaries = {name: path for name in _BINARIES if (path := gobuild.built(name)) is not None}
    if len(binaries) < len(set(_BINARIES)):
        return None
    key = _key(binaries, source)
    return f"{REPOSITORY}:{key}" if find_artefact("node-image", key) else None


def _key(binaries: Mapping[str, Path], source: debian.Distribution) -> str:
    here = Path(__file__).parent
    programs = [str(binaries[name].parent.name) for name in sorted(set(_BINARIES))]
    kind = gobuild.TOOLS / "kind" / "go.sum"
    return content_key(
        rootfs.packages_key(source),
        *programs,
        kind,
        *(here / f"{n}.py" for n in ("nodeimage", "imagestore", "rootfs", "ociimage")),
    )


def _make(directory: Path, packages: Path, binaries: Mapping[str, Path], key: str) -> None:
    kind_source = gobuild.module_source("kind", "sigs.k8s.io/kind")
    names = image_names(
        run([binaries["kubeadm"], "config", "images", "list", "--kubernetes-version", KUBERNETES_VERSION])
    )
    root = directory / "root"
    rootfs.build(root, packages, kind_source, binaries, names["pause"])
    images = directory / "images"
    progress("node-image", "writing the images that are preloaded")
    _write_images(images, names, binaries, root)
    progress("node-image", "importing them")
    store = root / "var/lib/containerd"
    archives = sorted(images.glob("*.tar"))
    import_images(store, archives, binaries, "preload", _START_SECONDS, options=["--no-unpack"])
    progress("node-image", "writing the archive")
    write_image(
        directory / "node-image.tar", f"{REPOSITORY}:{key}", [root], ["/usr/local/bin/entrypoint", "/sbin/init"],
        {"container": "docker"},  # systemd looks for it: systemd.io/CONTAINER_INTERFACE
        stop_signal="SIGRTMIN+3", compress=False, keep_owners=True,
    )  # fmt: skip
    shutil.rmtree(root)
    shutil.rmtree(images)


def image_names(listing: str) -> dict[str, str]:
    """Short name -> full name of the images that kubeadm asks for, so that its defaults find them."""
    return {name.rpartition(":")[0].rpartition("/")[2]: name for name in listing.split()}


def _write_images(
    directory: Path, names: Mapping[str, str], binaries: Mapping[str, Path], root: Path
) -> None:
    for name in _IMAGE_BINARIES:
        layer = tree_of_binaries({name: binaries[name]})
        if name == "kube-proxy":
            layer |= _with_libraries(root, "/usr/sbin/nft")
        write_image(directory / f"{name}.tar", names[name], [layer], [f"/usr/local/bin/{name}"])
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        write_image(directory / "busybox.tar", TEST_IMAGE, [_busybox(Path(scratch), root)], [], cmd=["sh"])


def _with_libraries(root: Path, program: str) -> dict[str, Path]:
    """A program of the tree and the libraries that its loader names, at their own paths."""
    listing = run(["chroot", root, "ldd", program])
    libraries = [word for word in listing.split() if word.startswith("/")]
    return {path: _inside(root, path) for path in (program, *libraries)}


def _inside(root: Path, path: str) -> Path:
    """The file behind a path of the tree. Its links (/lib is one) are relative to the tree, not to this machine."""
    return root / run(["chroot", root, "readlink", "-f", path]).strip().lstrip("/")


def _busybox(directory: Path, root: Path) -> Path:
    """A root with busybox and a link for each of its applets."""
    binary = directory / "bin" / "busybox"
    binary.parent.mkdir()
    shutil.copy(_inside(root, "/bin/busybox"), binary)
    for applet in run([binary, "--list"]).split():
        if applet != "busybox":
            (binary.parent / applet).symlink_to("busybox")
    for name in ("etc", "root", "var", "usr/bin"):
        (directory / name).mkdir(parents=True)
    (directory / "tmp").mkdir()
    (directory / "tmp").chmod(0o1777)
    (directory / "usr/bin/env").symlink_to("/bin/env")
    (directory / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
    )
    (directory / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    return directory
