"""The disk that makes a Kubernetes node of the virtual node: programs, and containerd's store with the images in it.

The images are imported on this machine, which takes seconds; in the node it would take minutes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from harness import driverimage, gobuild, imagestore
from harness.cache import artefact, content_key
from harness.gobuild import CNI_PLUGINS
from harness.imagestore import import_images
from harness.ociimage import tree_of_binaries, write_image
from harness.shell import need, run
from harness.vnode_disk import write_disk
from harness.vnode_packages import guest_tree

PAUSE_IMAGE = "railmate.local/pause:1"
BUSYBOX_IMAGE = "busybox:stable"  # what the manifests of the examples name
#: busybox, and beside it what looks at NICs and RDMA devices and measures them.
TOOLS_IMAGE = "railmate.local/rdma-tools:1"
_TOOLS = (
    *(
        f"/usr/bin/{name}"
        for name in ("ib_write_bw", "ibv_devices", "ibv_devinfo", "ibv_rc_pingpong", "ip", "rdma")
    ),
    "/usr/sbin/ethtool",
)
PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr", "crictl", "runc", "kubelet")
_DISK_SIZE = "6G"  # sparse
_START_SECONDS = 30


def store_disk(driver: driverimage.DriverImage) -> Path:
    """The disk, built if need be: /bin, /cni, and /containerd with the pause, busybox, tools and driver images."""
    binaries = gobuild.build([*PROGRAMS, *CNI_PLUGINS, "pause"])
    guest = guest_tree()
    key = content_key(
        *(path.parent.name for path in binaries.values()),
        guest.parent.name,
        driver.ref,
        *_TOOLS,
        Path(__file__),
        Path(imagestore.__file__),
    )

    def make(directory: Path) -> None:
        tree = directory / "tree"
        for place, names in (("bin", PROGRAMS), ("cni", CNI_PLUGINS)):
            (tree / place).mkdir(parents=True)
            for name in names:
                shutil.copy(binaries[name], tree / place / name)
        archives = [driver.archive, *_write_images(directory / "images", binaries["pause"], guest)]
        # in a mount namespace of its own, as it unpacks them
        inside = [need("unshare", "util-linux"), "--mount", "--propagation", "private"]
        import_images(tree / "containerd", archives, binaries, "vnode-store", _START_SECONDS, inside=inside)
        write_disk(directory / "store.ext4", tree, _DISK_SIZE)
        shutil.rmtree(tree)
        shutil.rmtree(directory / "images")

    return (
        artefact("vnode-store", key, make, "importing images and writing the node's image disk")
        / "store.ext4"
    )


def _write_images(directory: Path, pause: Path, guest: Path) -> list[Path]:
    directory.mkdir()
    write_image(
        directory / "pause.tar", PAUSE_IMAGE, [tree_of_binaries({"pause": pause})], ["/usr/local/bin/pause"]
    )
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        busybox = _busybox(Path(scratch), guest)
        write_image(directory / "busybox.tar", BUSYBOX_IMAGE, [busybox], [], cmd=["sh"])
        write_image(directory / "tools.tar", TOOLS_IMAGE, [busybox, _tools(guest)], [], cmd=["sh"])
    return sorted(directory.glob("*.tar"))


def _busybox(root: Path, guest: Path) -> Path:
    """A root with busybox and a link for each of its applets, and a user that is not root."""
    binary = root / "bin/busybox"
    binary.parent.mkdir()
    shutil.copy(guest / "usr/bin/busybox", binary)
    for applet in run([binary, "--list"]).split():
        if applet != "busybox":
            (binary.parent / applet).symlink_to("busybox")
    for name in ("etc", "root", "var"):
        (root / name).mkdir()
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    return root


def _tools(guest: Path) -> dict[str, Path]:
    """Programs of the node's own tree with their libraries, and the drivers that libibverbs loads at run time."""
    providers = guest / "usr/lib/x86_64-linux-gnu/libibverbs"
    paths = [*_TOOLS]
    paths += [f"/usr/lib/x86_64-linux-gnu/libibverbs/{path.name}" for path in providers.glob("librxe-*")]
    layer = {
        f"/etc/libibverbs.d/{path.name}": path for path in (guest / "etc/libibverbs.d").glob("rxe.driver")
    }
    for path in paths:
        layer[path] = _inside(guest, path)
        for word in run(["chroot", guest, "ldd", path]).split():
            if word.startswith("/"):
                layer[word] = _inside(guest, word)
    return layer


def _inside(guest: Path, path: str) -> Path:
    """The file behind a path of the tree, whose links are relative to the tree and not to this machine."""
    return guest / run(["chroot", guest, "readlink", "-f", path]).strip().lstrip("/")
