"""The config of a run: schema, loading, and differences. Imports nothing else of `trainer`."""

from trainer.config.load import RECIPE, load, suggestion_for, unknown_key
from trainer.config.schema import Dispatch, PipelineSchedule, Recompute, Switch
from trainer.config.sections import (
    Coefficients,
    Config,
    ConsoleConfig,
    Device,
    GpuChoice,
    InjectConfig,
    InjectPlace,
    Iteration,
    LoggingConfig,
    Moments,
    MuonConfig,
    OptimConfig,
    OptimizerName,
    ParallelConfig,
    ProfileConfig,
    RunConfig,
    Schedule,
    TensorboardConfig,
    TrainerConfig,
    WandbConfig,
    WandbMode,
)
