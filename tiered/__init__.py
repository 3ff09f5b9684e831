"""Train models larger than memory: ZeRO on a tiered store of device memory, RAM and NVMe, in a plain loop."""

from tiered.api import average, close, deferred_init, gather, no_sync, shard, stats
from tiered.checkpoint.convert import export_checkpoint, import_checkpoint
from tiered.checkpoint.load import load
from tiered.checkpoint.resume import resume
from tiered.checkpoint.save import save, saving
from tiered.config import Config, Emulation, MixedPrecision
from tiered.errors import (
    BudgetError,
    ConfigError,
    CorruptDataError,
    RankError,
    StorageError,
    SwapDirectoryError,
    SwapFullError,
    TieredError,
    UsageError,
)
from tiered.estimate import Estimate, estimate
from tiered.inspection.inspect import inspect
from tiered.inspection.report import Inspection
from tiered.optim.adamw import AdamW
from tiered.stats import DriveUse, Stats, StepLimit

__all__ = [
    "AdamW",
    "BudgetError",
    "Config",
    "ConfigError",
    "CorruptDataError",
    "DriveUse",
    "Emulation",
    "Estimate",
    "Inspection",
    "MixedPrecision",
    "RankError",
    "Stats",
    "StepLimit",
    "StorageError",
    "SwapDirectoryError",
    "SwapFullError",
    "TieredError",
    "UsageError",
    "average",
    "close",
    "deferred_init",
    "estimate",
    "export_checkpoint",
    "gather",
    "import_checkpoint",
    "inspect",
    "load",
    "no_sync",
    "resume",
    "save",
    "saving",
    "shard",
    "stats",
]
