"""The container runtime's side: an NRI plugin that speaks mux and ttrpc over the runtime's socket.

Everything above uses :class:`railmate.nri.plugin.NriPlugin` and the plain types of
:mod:`railmate.nri.events`.
"""
