"""What is in this machine: PCI functions, GPUs, NICs and RDMA devices. Reads only."""
