"""Whether what is published works: reading, judging and damping are pure, the monitor repeats them.

Its place among the packages is below ``kubelet`` and ``node`` and above ``publish``: it knows an offer and
the inventory behind it, and nobody who listens.
"""
