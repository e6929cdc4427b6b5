"""Makes the project's virtual environment from a lock, and does nothing while the lock stays the same.

Uses only the standard library, and syntax that Python 3.6 can parse, so that an old Python can report that it is too
old. Nothing is installed outside the environment or built from source; pip's settings name the package index.

    python3 tools/bootstrap.py runtime|dev [--venv .venv]
"""

import argparse
import configparser
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

OLDEST, NEWEST = (3, 10), (3, 13)
ROOT = Path(__file__).resolve().parent.parent
LOCKS = {"runtime": ROOT / "requirements.lock", "dev": ROOT / "requirements-dev.lock"}
MARKER = "rbln-harness.json"
# For a Python whose distribution left out ensurepip (Debian and Ubuntu without python3-venv).
PIP_WHEEL = "pip-26.3-py3-none-any.whl"
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
MACHINE_SETTINGS = "/etc/pip.conf"
INSTALL_HINT = "Install it (Debian, Ubuntu): sudo apt install python3 python3-venv"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("level", choices=sorted(LOCKS))
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--any-python", action="store_true", help="another python3.x may be used instead")
    options = parser.parse_args()
    use_a_supported_python(options.any_python)
    os.chdir(str(ROOT))
    if is_ready(options.level, options.venv):
        return
    # Two makes at once must not fill the same folder. A lock on this file needs no lock file.
    with Path(__file__).open() as myself:
        fcntl.flock(myself, fcntl.LOCK_EX)
        set_up(options.level, options.venv)


def use_a_supported_python(any_python):
    """Return on a supported interpreter; else continue on another available Python, or stop with a message."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1) if any_python else ():
        other = shutil.which(f"python3.{minor}")
        if other and try_run([other, "-c", ""]):
            os.execv(other, [other, *sys.argv])
    version = ".".join(map(str, sys.version_info[:2]))
    stop(
        f"Python {version} ({sys.executable}) is not supported: 3.{OLDEST[1]} to 3.{NEWEST[1]} are",
        "Name another Python: make PYTHON=/path/to/python3.12 <target>",
    )


def set_up(level, venv):
    """Install the packages of ``level`` into ``venv``, unless they are installed already."""
    if is_ready(level, venv):
        return
    held, place = read_marker(venv / MARKER), place_of_this_python()
    if {key: held.get(key) for key in place} != place:
        make_environment(venv)
        held = place
    say(f"installing the packages of {LOCKS[level].name}; the first time takes up to a minute")
    provide_pip(venv)
    install(
        venv,
        ["--require-hashes", "--only-binary", ":all:", "-r", str(LOCKS[level])],
        ["--no-build-isolation", "--no-deps", "--no-index", "--editable", str(ROOT)],
    )
    # Written last: an interrupted set-up runs again.
    held.update(wanted_by(level))
    (venv / MARKER).write_text(json.dumps(held, indent=2))
    say("ready")


def is_ready(level, venv):
    """Whether ``venv`` belongs to this interpreter and has the packages of the current locks of ``level``."""
    wanted = {**place_of_this_python(), **wanted_by(level)}
    held = read_marker(venv / MARKER)
    return {key: held.get(key) for key in wanted} == wanted


def place_of_this_python():
    return {"python": os.path.realpath(sys.executable), "version": list(sys.version_info[:2]), "root": str(ROOT)}


def wanted_by(level):
    """Digests of the locks that ``level`` is made of."""
    return {name: digest(LOCKS[name]) for name in LOCKS if name in (level, "runtime")}


def make_environment(venv):
    """A fresh environment without packages."""
    say(f"Python {sys.version.split()[0]} ({sys.executable}) -> {venv}")
    if venv.is_dir():
        shutil.rmtree(str(venv))
    try:
        import venv as venv_module
    except ImportError:
        stop("this Python has no venv module", INSTALL_HINT)
    # Without venv's with_pip: where ensurepip is missing it fails and leaves an incomplete environment.
    venv_module.EnvBuilder(symlinks=True).create(str(venv))


def provide_pip(venv):
    """Ensure pip in the environment: by ensurepip, by an available tool with an index, or from its wheel."""
    if try_run([python_of(venv), "-I", "-c", "import pip"]):
        return
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        provide_pip_without_ensurepip(venv)
    else:
        run([python_of(venv), "-I", "-m", "ensurepip", "--default-pip"], "ensurepip failed", INSTALL_HINT)


def provide_pip_without_ensurepip(venv):
    """Install the pinned wheel with the pip of this Python, with pip or uv on PATH, or from pip's index."""
    say(f"this Python has no ensurepip; fetching {PIP_WHEEL}")
    lock = venv / "pip.lock"
    lock.write_text("pip=={} --hash=sha256:{}\n".format(PIP_WHEEL.split("-")[1], PIP_SHA256))
    wanted = ["install", "--quiet", "--require-hashes", "--only-binary", ":all:", "-r", str(lock)]
    python = python_of(venv)
    for tool in ([sys.executable, "-m", "pip", "--python", python], ["pip3", "--python", python]):
        if try_run([*tool, *wanted]):
            break
    else:
        if not try_run(["uv", "pip", *wanted, "--python", python]):
            install_pip_wheel(venv)
    lock.unlink()


def install_pip_wheel(venv):
    """Fetch and check the pinned wheel of pip, and run it from the wheel to install itself."""
    wheel = venv / PIP_WHEEL
    wheel.write_bytes(fetch_pip_wheel())
    arguments = ["install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    run([python_of(venv), "-I", str(wheel / "pip"), *arguments], "pip cannot install itself", INSTALL_HINT)
    wheel.unlink()


def fetch_pip_wheel():
    """The bytes of PIP_WHEEL from pip's index, checked against PIP_SHA256."""
    index = pip_index()
    if not index:
        stop("this Python has neither ensurepip nor pip, and pip is set to no index", INSTALL_HINT)
    page_url = index.rstrip("/") + "/pip/"
    try:
        with urllib.request.urlopen(page_url, timeout=60) as response:
            page = response.read().decode("utf-8", "replace")
        links = re.findall(r'href="([^"#]*/' + re.escape(PIP_WHEEL) + r')[#"]', page)
        if not links:
            stop(f"{page_url} does not offer {PIP_WHEEL}", INSTALL_HINT)
        with urllib.request.urlopen(urllib.parse.urljoin(page_url, links[0]), timeout=60) as response:
            wheel = response.read()
    except OSError as error:
        stop(f"pip cannot be fetched from {page_url} ({error})", INSTALL_HINT)
    if hashlib.sha256(wheel).hexdigest() != PIP_SHA256:
        stop(f"{PIP_WHEEL} from {page_url} has an unexpected SHA-256", INSTALL_HINT)
    return wheel


def pip_index():
    """The package index of pip's settings: environment, the user's file, the machine's; "" without any."""
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    home = os.path.expanduser("~")  # noqa: PTH111  # Path.home() raises for a user without a home folder
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home + "/.config")
    named = [Path(os.environ["PIP_CONFIG_FILE"])] if os.environ.get("PIP_CONFIG_FILE") else []
    for path in [*named, config_home / "pip/pip.conf", Path(home, ".pip/pip.conf"), Path(MACHINE_SETTINGS)]:
        settings = configparser.RawConfigParser()
        try:
            settings.read(str(path))
            return settings.get("global", "index-url")
        except configparser.Error:
            continue
    return ""


def install(venv, *installs):
    """Run each ``pip install``: with uv, which is several times as fast, or with pip where uv fails."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from harness.uv import uv_install

    try:
        uv_install(python_of(venv), *installs)
    except (OSError, subprocess.CalledProcessError):
        say("uv failed; pip installs the packages, which takes longer")
        command = [python_of(venv), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
        for arguments in installs:
            run([*command, "install", *arguments], "pip install failed", "Check the network, then run make again")


def try_run(command):
    """Whether ``command`` exists and succeeds; its output is discarded."""
    try:
        return (
            subprocess.call(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            == 0
        )
    except OSError:
        return False


def run(command, what, hint):
    """Run ``command`` silently; on failure print its last lines and stop."""
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if not line.startswith("WARNING")]
        print("\n".join(f"    {line}" for line in lines[-8:]), file=sys.stderr)
        stop(what, hint)


def python_of(venv):
    return str(venv / "bin" / "python")


def digest(lock):
    """SHA-256 over a lock and the package's metadata."""
    return hashlib.sha256(lock.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()


def read_marker(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def say(text):
    print(f"set-up: {text}", flush=True)


def stop(what, hint):
    sys.exit(f"set-up: {what}. {hint}")


if __name__ == "__main__":
    main()
