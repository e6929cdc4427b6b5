"""What people write: experiments, conditions, servers and workloads, as frozen objects read from TOML.

Everything is checked at the door, unknown keys included; inside the harness a spec is never edited, only derived.
"""

from harness.spec.base import NAME_PATTERN, Spec, check_name, describe_validation_error, load_toml
from harness.spec.emulated import EmulatedDevice
from harness.spec.experiment import (
    BackendName,
    ClientName,
    ClientSpec,
    ConditionSpec,
    ExperimentSpec,
    LimitsSpec,
    OrderName,
    SloSpec,
    Treatment,
    experiment_file,
    experiment_table,
    load_experiment,
    parse_experiment,
)
from harness.spec.factors import Factor, Factors, factors_from_name, factors_text, level_text
from harness.spec.fleet import FleetSpec, Place
from harness.spec.laws import FixedLaw, LengthLaw, LognormalLaw, UniformLaw
from harness.spec.prediction import PerturbationSpec
from harness.spec.server import PatchMode, RulesName, ServerSpec
from harness.spec.shape import ServerShape
from harness.spec.stopping import StopSpec
from harness.spec.window import WindowSpec
from harness.spec.workload import PromptForm, SessionGroup, WorkloadSpec

__all__ = [
    "NAME_PATTERN",
    "BackendName",
    "ClientName",
    "ClientSpec",
    "ConditionSpec",
    "EmulatedDevice",
    "ExperimentSpec",
    "Factor",
    "Factors",
    "FixedLaw",
    "FleetSpec",
    "LengthLaw",
    "LimitsSpec",
    "LognormalLaw",
    "OrderName",
    "PatchMode",
    "PerturbationSpec",
    "Place",
    "PromptForm",
    "RulesName",
    "ServerShape",
    "ServerSpec",
    "SessionGroup",
    "SloSpec",
    "Spec",
    "StopSpec",
    "Treatment",
    "UniformLaw",
    "WindowSpec",
    "WorkloadSpec",
    "check_name",
    "describe_validation_error",
    "experiment_file",
    "experiment_table",
    "factors_from_name",
    "factors_text",
    "level_text",
    "load_experiment",
    "load_toml",
    "parse_experiment",
]
