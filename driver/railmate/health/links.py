"""The kernel's word that a link fell or rose, at once and not at the next look.

RTM_NEWLINK is sent to RTNLGRP_LINK for each change of a netdev's flags, the carrier's among them (rtnetlink(7),
linux/if_link.h). An InfiniBand port without a netdev on the node sends nothing there; the periodic look finds it.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
from collections.abc import Callable

from railmate.attach import linkmessages

log = logging.getLogger(__name__)

#: IFF_UP, IFF_RUNNING, IFF_LOWER_UP and IFF_DORMANT (linux/if.h): what carrier and operational state are made of.
_LINK_FLAGS = 0x1 | 0x40 | 0x10000 | 0x20000
#: Seconds between two looks whether to end.
_TURN = 1.0


class LinkWatch:
    """``run`` blocks until ``stop``; ``changed`` is called, from its thread, when a link of the node fell or rose."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            with _listener() as listener:
                self._listen(listener, Links())
        except OSError as error:
            log.warning("the kernel does not tell of links that fall (%s); they are looked at in turn", error)
            self._stopping.wait()

    def stop(self) -> None:
        self._stopping.set()

    def _listen(self, listener: socket.socket, links: Links) -> None:
        while not self._stopping.is_set():
            if not select.select([listener], [], [], _TURN)[0]:
                continue
            try:
                changed = links.heard(listener.recv(65536))
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                changed = True  # messages were lost, so anything may have changed
            if changed:
                self._changed()


class Links:
    """The flags of all links that were spoken of. Pods' links come and go all the time, and most messages tell of
    something else than the carrier: neither is worth a look."""

    def __init__(self) -> None:
        self._flags: dict[int, int] = {}

    def heard(self, data: bytes) -> bool:
        """Whether one of these messages says that a link fell or rose. The first word about a link counts: what it
        was before is not known."""
        changed = False
        for kind, index, all_flags in linkmessages.heard(data):
            flags = all_flags & _LINK_FLAGS
            if kind == linkmessages.DELLINK:
                self._flags.pop(index, None)
            else:
                changed |= self._flags.get(index) != flags
                self._flags[index] = flags
        return changed


def _listener() -> socket.socket:
    listener = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE
    )
    try:
        listener.bind((0, linkmessages.GROUP))
    except OSError:
        listener.close()
        raise
    return listener
