"""Train models larger than memory: ZeRO Stage 3 on a tiered store of device memory, RAM and NVMe, in a plain loop."""

from tiered.api import close, deferred_init, gather, shard, stats
from tiered.config import Config, Emulation, MixedPrecision
from tiered.errors import (
    BudgetError,
    ConfigError,
    CorruptDataError,
    StorageError,
    SwapDirectoryError,
    SwapFullError,
    TieredError,
    UsageError,
)
from tiered.estimate import Estimate, estimate
from tiered.optim.adamw import AdamW
from tiered.stats import Stats

__all__ = [
    "AdamW",
    "BudgetError",
    "Config",
    "ConfigError",
    "CorruptDataError",
    "Emulation",
    "Estimate",
    "MixedPrecision",
    "Stats",
    "StorageError",
    "SwapDirectoryError",
    "SwapFullError",
    "TieredError",
    "UsageError",
    "close",
    "deferred_init",
    "estimate",
    "gather",
    "shard",
    "stats",
]
