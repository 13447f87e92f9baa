"""Changes to the kernel: a VF's netdev and RDMA devices on their way into a pod's network namespace, set up there as
the claim says, and home again as they were.

Everything here blocks: call it through ``asyncio.to_thread``. :mod:`railmate.attach.netdev` is the entrance.
"""
