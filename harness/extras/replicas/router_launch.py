"""How each router is started: its command, its configuration and its address, as a launch plan.

Sources: vllm-router 0.1.17 and sglang-router 0.3.2, ``--help``; HAProxy 2.6 configuration manual; nginx 1.22,
ngx_http_upstream_module and ngx_http_proxy_module.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from harness.children import own_command
from harness.errors import ServerError
from harness.extras.replicas.router import RouterConfig
from harness.measure.records import layout
from harness.measure.server.life import LOOPBACK, LaunchPlan
from harness.measure.server.process import free_port
from harness.model.spec.server import ROUTER_WORDS, RouterSpec

_HAPROXY = """\
global
    log stdout format raw local0
defaults
    mode http
    log global
    option httplog
    option http-no-delay
    retries 0
    timeout connect 10s
    timeout client 1h
    timeout server 1h
frontend router
    bind {host}:{port}
    monitor-uri {health}
    default_backend replicas
backend replicas
    balance {policy}
    hash-type consistent
    http-response set-header X-Replica %[srv_name]
{servers}
"""
_NGINX = """\
daemon off;
master_process off;
pid {pid};
error_log stderr;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {body};
    proxy_temp_path {proxy};
    fastcgi_temp_path {fastcgi};
    uwsgi_temp_path {uwsgi};
    scgi_temp_path {scgi};
    upstream replicas {{
        {policy}
{servers}
        keepalive 256;
    }}
    server {{
        listen {host}:{port};
        client_max_body_size 0;
        location = {health} {{ return 200; }}
        location / {{
            proxy_pass http://replicas;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_next_upstream off;
            proxy_read_timeout 1h;
            proxy_send_timeout 1h;
            add_header X-Replica $upstream_addr;
        }}
    }}
}}
"""


def router_launch(router: RouterSpec, urls: Sequence[str], folder: Path) -> LaunchPlan:
    """How to start the router before the servers at ``urls``. folder: of the run; its files are written there.

    Raises ServerError where its program is not there.
    """
    port = free_port(LOOPBACK)
    config = (folder / layout.ROUTER_CONFIG).absolute()
    argv = [*_COMMANDS[router.kind](router, urls, port, config)]
    if router.kind != "command":
        argv += router.command
    return LaunchPlan(
        backend="router",
        argv=tuple(argv),
        host=LOOPBACK,
        port=port,
        model="",
        env={"PYTHONUNBUFFERED": "1"},
        files={"config": config} if config.exists() else {},
        requested={"router": router.model_dump(mode="json"), "urls": list(urls)},
    )


def _harness(router: RouterSpec, urls: Sequence[str], port: int, config: Path) -> Sequence[str]:
    routed = str(config.with_name(layout.ROUTED))
    started_with = RouterConfig(LOOPBACK, port, tuple(urls), router.policy, router.session_header, routed)
    _write(config, json.dumps(started_with._asdict(), indent=2) + "\n")
    return own_command("harness.extras.replicas.router:main", config)


def _vllm_router(router: RouterSpec, urls: Sequence[str], port: int, _config: Path) -> Sequence[str]:
    return _program("vllm-router", router), *_workers(router, urls, port)


def _sglang_router(router: RouterSpec, urls: Sequence[str], port: int, _config: Path) -> Sequence[str]:
    return _program("sglang-router", router), "launch", *_workers(router, urls, port)


def _workers(router: RouterSpec, urls: Sequence[str], port: int) -> Sequence[str]:
    """The words that both take. Nothing may be repeated behind the harness's back."""
    policy = ROUTER_WORDS[router.kind].get(router.policy, router.policy)
    address = ("--host", LOOPBACK, "--port", str(port), "--prometheus-port", str(free_port(LOOPBACK)))
    return (*address, "--worker-urls", *urls, "--policy", policy, "--disable-retries", "--disable-circuit-breaker")


def _haproxy(router: RouterSpec, urls: Sequence[str], port: int, config: Path) -> Sequence[str]:
    servers = "\n".join(f"    server {place} {_host(url)}" for place, url in enumerate(urls))
    policy = ROUTER_WORDS["haproxy"][router.policy].format(session_header=router.session_header)
    text = _HAPROXY.format(
        host=LOOPBACK, port=port, health=_haproxy_word(router.health), policy=policy, servers=servers
    )
    _write(config, text)
    return _program("haproxy", router), "-db", "-f", str(config)


def _nginx(router: RouterSpec, urls: Sequence[str], port: int, config: Path) -> Sequence[str]:
    servers = "\n".join(f"        server {_host(url)} max_fails=0;" for url in urls)
    variable = router.session_header.lower().replace("-", "_")
    policy = ROUTER_WORDS["nginx"][router.policy].format(session_variable=variable)
    folder = config.with_name("router.tmp")
    folder.mkdir(exist_ok=True)
    places = {name: _nginx_word(str(folder / name)) for name in ("body", "proxy", "fastcgi", "uwsgi", "scgi")}
    places |= {"pid": _nginx_word(str(folder / "nginx.pid")), "health": _nginx_word(router.health)}
    text = _NGINX.format(host=LOOPBACK, port=port, policy=policy, servers=servers, **places)
    _write(config, text)
    return _program("nginx", router), "-e", "stderr", "-c", str(config)


def _nginx_word(text: str) -> str:
    """A word of nginx's configuration; outside of quotes ";", braces and spaces end it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _haproxy_word(text: str) -> str:
    """A word of HAProxy's configuration."""
    return re.sub(r"([\\\"'# ])", r"\\\1", text)


def _command(router: RouterSpec, urls: Sequence[str], port: int, _config: Path) -> Sequence[str]:
    texts = {"{host}": LOOPBACK, "{port}": str(port), "{urls}": " ".join(urls), "{hosts}": ",".join(map(_host, urls))}
    words: list[str] = []
    for word in router.command:
        if word == "{urls}":
            words += urls
            continue
        for name, text in texts.items():
            word = word.replace(name, text)
        words.append(word)
    return [_found(words[0], router), *words[1:]]


_COMMANDS: Mapping[str, Callable[[RouterSpec, Sequence[str], int, Path], Sequence[str]]] = {
    "harness": _harness,
    "vllm-router": _vllm_router,
    "sglang-router": _sglang_router,
    "haproxy": _haproxy,
    "nginx": _nginx,
    "command": _command,
}
_INSTALLS = {
    "vllm-router": "pip install vllm-router, or name its environment in server.router.environment",
    "sglang-router": "pip install sglang-router, or name its environment in server.router.environment",
    "haproxy": "apt-get install haproxy",
    "nginx": "apt-get install nginx",
}


def check_program(router: RouterSpec) -> None:
    """ServerError where the router's program is not there."""
    if router.kind == "command":
        _found(router.command[0], router)
    elif router.kind != "harness":
        _program(router.kind, router)


def _program(name: str, router: RouterSpec) -> str:
    return _found(name, router, _INSTALLS[name])


def _found(name: str, router: RouterSpec, hint: str = "Give its path, or put it on PATH") -> str:
    """The program in the router's environment, or on PATH and where a system keeps its servers."""
    folder = Path(router.environment) / "bin" if router.environment else None
    path = (
        shutil.which(name, path=str(folder)) if folder else shutil.which(name) or shutil.which(name, path="/usr/sbin")
    )
    if path is None:
        where = str(folder) if folder else "PATH"
        raise ServerError(f"the router {name} is not in {where}", where="server.router", hint=hint)
    return path


def _host(url: str) -> str:
    return urlsplit(url).netloc


def _write(path: Path, text: str) -> None:
    with ServerError.on_os_error("cannot be written", where=path, hint="Free some disk space"):
        path.write_text(text, encoding="utf-8")
