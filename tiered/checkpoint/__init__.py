"""Checkpoints: training state in files that load on any number of ranks, in any stage, tier and budget.

manifest (what is where) -> folder (which files count) -> slices (bytes in and out) -> save, load
                                                                                    -> convert, to and from others
resume goes on from a swap directory instead, without a file of its own.
"""
