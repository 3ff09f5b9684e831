"""The Stage 3 partitioner: groups of parameters that are gathered and released together, and their hooks.

Knows parameters and modules; never files. Every rule here serves one idea: a parameter is a page, and touching one
that is away brings it in.
"""
