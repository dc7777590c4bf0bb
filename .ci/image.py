"""Build the image of the Dockerfile twice and check it: bytecode, equal builds, and signals to process 1.

Needs root, buildah, and debootstrap. Without one of them, or without the network, it prints one line and passes. A base
of Debian's packages replaces the Dockerfile's base image.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PROGRAMS = ("buildah", "debootstrap", "unshare", "chroot")
INSTALL = "apt-get install buildah debootstrap"
SUITE = "bookworm"
PACKAGES = "python3-venv,python3-pip,python-is-python3,ca-certificates"
SECONDS = 480
"""Limit for both builds. The checks take half a minute more."""
START_SECONDS = 60
MOST_CPU_TO_HANDLER = 0.2
"""Seconds of CPU until process 1 handles SIGTERM. The kernel drops earlier signals."""
NETWORK = re.compile(
    r"NewConnectionError|Max retries exceeded|Read timed out|ConnectionResetError|ProxyError|SSLError"
    r"|Temporary failure in name resolution|No matching distribution found|HTTPError: (?:403|429|5\d\d)"
)
MODULES = "import proxy.server.run, proxy.server.app, uvloop, httptools, litellm"
COMPILED = re.compile(r"^# code object from '?(/\S+\.py)'?$", re.MULTILINE)
READ = re.compile(r"^# code object from '\S+\.pyc'$", re.MULTILINE)
"""Lines of Python's verbose output."""
AS_PROCESS_1 = """
mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && mount -t tmpfs tmpfs "$1/tmp" || exit 9
root=$1 user=$2 folder=$3
shift 3
exec chroot --userspec="$user" "$root" env -i -C "$folder" "$@"
"""
TICKS = os.sysconf("SC_CLK_TCK")

_until = time.monotonic() + SECONDS


class Skipped(Exception):
    """The machine or its network can't build the image."""


def run(*command: str, log: Path | None = None) -> str:
    """Return the output of a command. Raises ``CalledProcessError`` or ``TimeoutExpired``."""
    remaining = max(30, _until - time.monotonic())
    if log is None:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=remaining).stdout
    with log.open("w") as output:
        subprocess.run(command, check=True, stdout=output, stderr=output, timeout=remaining, cwd=ROOT)
    return ""


class Buildah:
    """buildah with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for driver in ("overlay", "vfs"):  # overlay fails within a container
            self._command = ("buildah", "--root", f"{folder}/{driver}", "--runroot", f"{folder}/run-{driver}")
            self._command += ("--storage-driver", driver)
            with contextlib.suppress(subprocess.CalledProcessError):
                self("mount", self("from", "scratch"))
                return
        raise Skipped("buildah can't create containers here")

    def __call__(self, *arguments: str, log: Path | None = None) -> str:
        return run(*self._command, *arguments, log=log).strip()

    def close(self) -> None:
        for name in ("umount", "rm"):
            subprocess.run([*self._command, name, "--all"], check=False, capture_output=True)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((one for one in mounts if one.startswith(f"{self._folder}/")), reverse=True):
            subprocess.run(["umount", mount], check=False)


def base(buildah: Buildah, folder: Path) -> str:
    """Build an image with Python from Debian's packages. pip in it uses this machine's certificates and index."""
    mirrors = run("apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {SUITE}").split()
    log, root = folder / "base.log", folder / "base"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *mirrors[:1]]
    try:
        run(*command, log=log)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Skipped(f"debootstrap failed ({log.read_text()[-200:].strip()})") from error
    settings = "[global]\n"
    certificates = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    if certificates is not None:
        shutil.copy(certificates, root / "etc/ssl/certs/ca-certificates.crt")
        settings += "cert = /etc/ssl/certs/ca-certificates.crt\n"
    if index := os.environ.get("PIP_INDEX_URL"):
        settings += f"index-url = {index}\n"
    (root / "etc/pip.conf").write_text(settings)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(root), "/")
    shutil.rmtree(root)
    buildah("commit", "--quiet", "--rm", container, "localhost/python")
    return "localhost/python"


class Image(NamedTuple):
    """The root of an image, and its configuration."""

    root: Path
    config: Mapping[str, Any]


def build(buildah: Buildah, base: str, name: str, folder: Path) -> Image:
    log = folder / f"{name}.log"
    options = ("--isolation", "chroot", "--format", "docker", "--no-cache", "--build-arg", f"PYTHON_IMAGE={base}")
    try:
        buildah("build", *options, "--tag", f"localhost/{name}", ".", log=log)
    except subprocess.TimeoutExpired as error:
        raise Skipped("the build took too long") from error
    except subprocess.CalledProcessError as error:
        if found := NETWORK.search(log.read_text()):
            raise Skipped(f"the build can't download packages ({found[0]})") from error
        sys.exit(f"The image can't be built:\n{log.read_text()[-3000:]}")
    root = Path(buildah("mount", buildah("from", f"localhost/{name}")))
    return Image(root, json.loads(buildah("inspect", "--type", "image", f"localhost/{name}"))["Docker"]["config"])


def contents(root: Path) -> dict[str, tuple[object, ...]]:
    """Return mode, owner, and digest of each file."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in folders + files):
            status = path.lstat()
            content = os.readlink(path) if path.is_symlink() else ""
            if stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(root))] = (status.st_mode, status.st_uid, status.st_gid, content)
    return found


class Process(NamedTuple):
    """Process 1 of the image, as this machine shows it."""

    pid: int
    runner: subprocess.Popen[bytes]

    def cpu(self) -> float:
        """Return the seconds of CPU so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def handles(self) -> bool:
        """Return whether it handles SIGTERM, which an earlier program of the same process doesn't."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)


@contextlib.contextmanager
def process_1(image: Image, log: Path, *arguments: str, **more: str) -> Iterator[Process]:
    """Run the image's command as process 1, in namespaces of its own, as the image's user."""
    config = image.config
    environment = [*config["Env"], *(f"{name}={value}" for name, value in more.items())]
    command = [*config["Entrypoint"], *(arguments or config["Cmd"])]
    inside = ["sh", "-c", AS_PROCESS_1, "sh", str(image.root), config["User"], config["WorkingDir"]]
    unshare = ["unshare", "--pid", "--net", "--mount", "--fork", "--kill-child"]
    with log.open("wb") as output:
        runner = subprocess.Popen([*unshare, *inside, *environment, *command], stdout=output, stderr=output)
    children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
    try:
        await_(lambda: bool(children.read_text().split()), runner, log)
        yield Process(int(children.read_text().split()[0]), runner)
    finally:
        # The user of process 1 has changed, so it doesn't end with unshare.
        for pid in children.read_text().split() if runner.poll() is None else ():
            os.kill(int(pid), signal.SIGKILL)
        runner.kill()
        runner.wait()


def await_(done: Callable[[], bool], runner: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while not done():
        if runner.poll() is not None or time.monotonic() > until:
            sys.exit(f"Process 1 isn't ready (status {runner.poll()}):\n{log.read_text()[-2000:]}")
        time.sleep(0.005)


def check_signals(image: Image, folder: Path) -> Iterator[str]:
    """Stop process 1 at several times. Yield the faults."""
    log = folder / "signals.log"
    cases: list[tuple[float, Sequence[str]]] = [(after, ()) for after in (0.1, 0.5, 1, 3)]
    cases += [(after, (*image.config["Cmd"], "--workers", "2")) for after in (0.5, 3)]
    for after, arguments in cases:
        with process_1(image, log, *arguments) as process:
            began = time.monotonic()
            await_(process.handles, process.runner, log)
            cpu = process.cpu()
            time.sleep(max(0, began + after - time.monotonic()))
            sent = time.monotonic()
            os.kill(process.pid, signal.SIGTERM)
            try:
                status: int | None = process.runner.wait(40)
            except subprocess.TimeoutExpired:
                status = None
            took = time.monotonic() - sent
        workers = shlex.join(arguments[-2:]) or "--workers 1"
        print(f"SIGTERM after {after} s, {workers}: status {status} in {took:.1f} s; handled after {cpu:.2f} s of CPU")
        if status != 0 or cpu > MOST_CPU_TO_HANDLER:
            yield f"SIGTERM after {after} s with {workers}: status {status}\n{log.read_text()[-2000:]}"


def check_start(image: Image, folder: Path) -> Iterator[str]:
    """Print the fewest seconds of CPU to ready in three starts.

    Yield the modules that a start compiles, a wrong address, and a store that isn't the user's.
    """
    log = folder / "ready.log"

    def start(**more: str) -> float:
        with process_1(image, log, **more) as process:
            await_(lambda: "Application startup complete" in log.read_text(), process.runner, log)
            return process.cpu()

    print(f"CPU to ready: {min(start() for _ in range(3)):.2f} s")
    ports = [port.partition("/")[0] for port in image.config["ExposedPorts"]]
    if [port for port in ports if f"0.0.0.0:{port}" in log.read_text()] != ports:
        yield f"The image doesn't listen on all addresses at {ports}:\n{log.read_text()[-2000:]}"
    (volume,) = image.config["Volumes"]
    store = image.root / volume.lstrip("/") / "compaction.db"
    owner = f"{store.stat().st_uid}:{store.stat().st_gid}" if store.exists() else "nobody"
    if owner != image.config["User"] or owner.startswith("0:") or image.config["WorkingDir"] != volume:
        yield f"The store in {volume} belongs to {owner}, not to the image's user"
    start(PYTHONVERBOSE="1")
    compiled = COMPILED.findall(log.read_text())
    read = len(READ.findall(log.read_text()))
    print(f"bytecode: {read} modules read at the start, {len(compiled)} compiled")
    if compiled or not read:
        yield f"The image compiles at each start: {compiled[:5]}"


def check_bytecode(image: Image) -> Iterator[str]:
    """Yield the modules that the image compiles at each import."""
    command = ["env", "-i", *image.config["Env"], "python", "-v", "-c", MODULES]
    done = subprocess.run(["chroot", str(image.root), *command], capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"The image can't import its modules:\n{done.stderr[-2000:]}"
    compiled = COMPILED.findall(done.stderr)
    read = len(READ.findall(done.stderr))
    size = sum(path.lstat().st_size for path in (image.root / "opt").rglob("*")) >> 20
    print(f"bytecode: {read} modules read, {len(compiled)} compiled; /opt has {size} MiB")
    if compiled or not read:
        yield f"The image compiles at each import: {compiled[:5]}"


def checked(folder: Path) -> list[str]:
    """Return the faults of the image."""
    buildah = Buildah(folder)
    try:
        python = base(buildah, folder)
        first, second = (build(buildah, python, name, folder) for name in ("first", "second"))
        one, other = contents(first.root), contents(second.root)
        differing = sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))
        print(f"two builds: {len(one)} files, {len(differing)} differ")
        faults = [f"Two builds differ: {differing[:5]}"] if differing else []
        faults += check_bytecode(first)
        faults += check_signals(first, folder)
        faults += check_start(first, folder)
        return faults
    finally:
        buildah.close()


def main() -> None:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        reason = f"it needs {', '.join(missing)}. Install them: {INSTALL}" if missing else "it needs root"
        print(f"The image isn't checked: {reason}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        try:
            faults = checked(Path(folder))
        except Skipped as reason:
            print(f"The image isn't checked: {reason}", file=sys.stderr)
            return
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
