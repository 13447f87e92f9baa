"""The PCIe graph, distances and pairs: pure functions of an inventory."""
