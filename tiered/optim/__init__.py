"""The optimizer on tiered state: CPU kernels here, the step that drives them beside.

Imports go downwards only: this package may use store, io and device; nothing below it uses this package.
"""
