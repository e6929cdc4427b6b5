"""The paper: its analyses and rules, its tables from a user's own runs, its printed figures, and its signs."""

from harness.plugins import Plugin

_AT = "harness.extras.paper.commands"
_ANALYSES = "harness.extras.paper.catalogue.shipped"
_RULES = "harness.extras.paper.rules"
PLUGIN = Plugin(
    name="paper",
    summary="the paper's experiments, analyses, rules, tables and signs",
    groups={"paper": "The paper's experiments, analyses and tables.\n\nExample: `harness paper catalogue`"},
    commands={
        "paper catalogue": f"{_AT}:catalogue",
        "paper analyse": f"{_AT}:analyse",
        "paper tables": f"{_AT}:tables",
        "paper signs": f"{_AT}:signs",
        "paper rules": f"{_AT}:rules",
    },
    analyses={
        "general": f"{_ANALYSES}:GENERAL",
        "configuration": f"{_ANALYSES}:CONFIGURATION",
        "effects": f"{_ANALYSES}:EFFECTS",
        "saturation": f"{_ANALYSES}:SATURATION",
        "alignment": f"{_ANALYSES}:ALIGNMENT",
        "bucket-intervention": f"{_ANALYSES}:BUCKET_INTERVENTION",
        "dispersion": f"{_ANALYSES}:DISPERSION",
        "prefill-injection": f"{_ANALYSES}:PREFILL_INJECTION",
        "joined": f"{_ANALYSES}:JOINED",
        "neighbours": f"{_ANALYSES}:NEIGHBOURS",
        "duet": f"{_ANALYSES}:DUET",
        "no-treatment": f"{_ANALYSES}:NO_TREATMENT",
        "recompilation": f"{_ANALYSES}:RECOMPILATION",
        "step-cost": f"{_ANALYSES}:STEP_COST",
        "sequential-survival": f"{_ANALYSES}:SEQUENTIAL_SURVIVAL",
        "slot-intervention": f"{_ANALYSES}:SLOT_INTERVENTION",
        "dummy-lifecycle": f"{_ANALYSES}:DUMMY_LIFECYCLE",
    },
    rules={
        "direction": f"{_RULES}:DirectionRule",
        "occupancy-prediction": f"{_RULES}:OccupancyPredictionRule",
        "saturation": f"{_RULES}:SaturationRule",
        "recompilation": f"{_RULES}:RecompilationRule",
        "no-treatment": f"{_RULES}:NoTreatmentRule",
        "interference": f"{_RULES}:InterferenceRule",
    },
)
