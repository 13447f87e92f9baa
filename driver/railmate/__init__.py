"""railmate: a Kubernetes DRA driver for GPU–NIC pairs that share a PCIe switch."""

__version__ = "0.1.0"
