"""Whether a run's server had the settings that its condition asked for: what differs or is not shown, as findings.

A setting that some condition varies must be shown in every run, or declared; others are compared where they are shown.
Only the manifest is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.engine.config import HARNESS_KEYS, changed_keys, differences, keys_shown, requested_settings
from harness.kinds import kind_of_run
from harness.records import Finding, Manifest
from harness.records.manifest import SETTING_DECLARED, table_at
from harness.spec import ServerSpec

# What a served stack says of itself at its start.
_TOLD_AT_START = frozenset({"max_num_seqs", "slot_tokens", "prefix_caching", "kv_slots"})
# Reported by a finding of their own, or not of the server.
_NOT_HELD = frozenset({"rules", "cost_model"})


def check_settings(manifest: Manifest) -> Iterator[Finding]:
    """Findings on the settings of one run."""
    varied, shown_names = manifest.varied_settings - HARNESS_KEYS, manifest.effective.get("shown", ())
    if not varied and not shown_names:
        return
    server = ServerSpec.model_validate(manifest.requested_server)
    table = table_at(manifest.effective, "server")
    in_force = {name: table[name] for name in shown_names if name in table}
    shown, is_fresh = keys_shown(in_force), kind_of_run(manifest.backend).is_restarted
    held = varied | ((_TOLD_AT_START | shown if is_fresh else changed_keys(server)) - _NOT_HELD)
    for evidence in differences(server, in_force, held):
        yield Finding(
            code="setting-differs",
            severity="invalid",
            evidence=evidence,
            hint="Change [server], the artifact or the server so that they agree",
        )
    if unshown := varied - shown:
        named = ", ".join(f"{key} = {requested_settings(server)[key]}" for key in sorted(unshown))
        yield (
            Finding(code=SETTING_DECLARED, severity="warning", evidence=f"declared, not verified: {named}")
            if server.declared
            else Finding(
                code="setting-unshown",
                severity="invalid",
                evidence=f"conditions differ in what nothing shows: {named}",
                hint="Give each condition a server.url of its own, or set server.declared = true",
            )
        )
    if unknown := held - varied - shown:
        yield Finding(
            code="setting-unknown",
            severity="warning",
            evidence=f"nothing shows {', '.join(sorted(unknown))}",
            hint="Check that INFO lines of vllm and vllm_rbln are in server.log" if is_fresh else "",
        )
