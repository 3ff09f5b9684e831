"""The command `tiered` (also `python -m tiered`): trains a byte-level GPT on text files, within the memory given,
converts and inspects checkpoints, and makes pages of timelines.

Owns options, display and exit codes; everything it does to a model goes through the package's public names.
Nothing else in the package imports this folder.

    main     the command and its exit codes        options   the command line -> one frozen order
    looking  the same of what only reads
    ranks    this process among those of torchrun, and who speaks for them
    convert  checkpoints to and from the formats of others
    inspect  what a checkpoint or swap directory holds, and what is wrong with it
    report   timelines as a page                   recorded  what is in one    steps  of a run    page  HTML of both
    train    the loop, tiered                      plain     the same loop in plain PyTorch, to compare with
    progress what is shown while it runs           summary   what is shown and written at the end
    gpt      the model    corpus  the bytes        signals   SIGINT and SIGTERM    memory  resident growth
"""

from tiered.cli.main import main

__all__ = ["main"]
