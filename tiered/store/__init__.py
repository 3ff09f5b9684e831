"""The tiered store: blocks of bytes, where they live, and the hard budgets they live within.

It knows keys and bytes, never parameters or devices' streams.
"""
