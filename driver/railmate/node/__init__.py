"""Wires the node plugin's process together. Nothing else knows all the parts."""
