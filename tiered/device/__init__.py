"""Devices: where gathered parameters live and how bytes get there.

A device allocates buffers with a fixed address, copies to and from host memory asynchronously, and hands back a ticket
for each copy. It knows bytes and tensors, never parameters, files or budgets.
"""
