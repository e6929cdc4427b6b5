"""Other hosts: servers started over ssh, and fleets whose devices are on several hosts."""

from harness.plugins import Plugin

_AT = "harness.extras.remote"
PLUGIN = Plugin(
    name="remote",
    summary="servers over ssh, and fleets over several hosts (rbln-harness[cluster])",
    commands={"fleet worker": f"{_AT}.commands:worker"},
    services={"server over ssh": f"{_AT}.ssh:SERVICE", "fleet over hosts": f"{_AT}.hosts:perform_over_hosts"},
)
