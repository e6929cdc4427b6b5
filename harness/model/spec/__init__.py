"""Specifications: experiments, conditions, servers, workloads and rules, as frozen objects read from TOML.

Every key is checked when a file is read. A specification is never changed afterwards.
"""

from harness.model.spec.base import NAME_PATTERN, Spec, check_name, describe_validation_error, load_toml
from harness.model.spec.experiment import (
    BackendName,
    ConditionSpec,
    ExperimentSpec,
    OrderName,
    Treatment,
    experiment_file,
    experiment_table,
    load_experiment,
    parse_experiment,
)
from harness.model.spec.rules import Factor, Factors, factors_from_name, factors_text, level_text
from harness.model.spec.sections import (
    ClientSpec,
    DeviceSlot,
    EmulatedDevice,
    FleetSpec,
    LimitsSpec,
    PerturbationSpec,
    SloSpec,
    StopSpec,
    TuneSpec,
    WindowSpec,
)
from harness.model.spec.server import PatchMode, RulesName, ServerShape, ServerSpec
from harness.model.spec.workload import (
    FixedLength,
    LengthDistribution,
    LognormalLength,
    PromptForm,
    RequestSpec,
    SessionGroup,
    UniformLength,
    WorkloadSpec,
)
