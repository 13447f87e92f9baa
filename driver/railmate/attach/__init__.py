"""Changes to the kernel: moving a VF's netdev into a pod's network namespace, and home again.

Everything here blocks: call it through ``asyncio.to_thread``. :mod:`railmate.attach.netdev` is the entrance.
"""
