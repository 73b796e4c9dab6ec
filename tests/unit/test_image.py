"""The container file names existing files and pinned versions. Its gateway script ends when
either the gateway or its raylet ends. Stubs replace `ray` and `tandem`; test_pods.py runs the
real ones."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deployed import DEPLOY
from tests.kustomize import render
from tests.waiting import wait_until

ROOT = DEPLOY.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("cpu", "cuda")
STUB = """#!/bin/bash
case "$1" in health-check) touch asked; test -f head-is-up; exit ;; esac
trap 'echo "$(basename "$0") got TERM" >> said; exit 7' TERM
echo "$(basename "$0") $*" >> said
echo $$ > "$0.new" && mv "$0.new" "$0.pid"
while test ! -f "$(basename "$0")-ends"; do /bin/sleep 0.02; done
exit 3
"""


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage, including those of the stages that it is based on."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.M)
    found: dict[str, list[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = [*found.get(match[1], []), line]
        elif line:
            found[name].append(line)
    return found


def copied(stage: str) -> list[str]:
    """Return the paths that a stage copies from the tree."""
    lines = [line.split()[1:] for line in stages()[stage] if line.startswith("COPY ")]
    trees = [line for line in lines if not line[0].startswith("--from")]
    return [word for line in trees for word in line[:-1] if not word.startswith("--")]


def test_every_source_is_there_and_every_package_is_copied() -> None:
    for stage in stages():
        assert all((ROOT / source).exists() for source in copied(stage))
    linked = {path.resolve() for path in (ROOT / "src" / "tandem").iterdir() if path.is_symlink()}
    folders = {"src", *(str(path.relative_to(ROOT)) for path in linked)}
    assert folders | {"pyproject.toml", PYPROJECT["project"]["readme"]} <= set(copied("wheel"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_pins_what_the_project_and_the_manifests_say(target: str) -> None:
    text = "\n".join(stages()[target])
    torch = [name for name in PYPROJECT["project"]["dependencies"] if name.startswith("torch==")]
    assert re.findall(r"torch==[\d.]+", text) == torch
    [ray] = re.findall(r'"ray\[default\]==([\d.]+)"', text)
    [cluster] = [m for m in render(DEPLOY / "base") if m["kind"] == "RayCluster"]
    assert ray == cluster["spec"]["rayVersion"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_can_be_a_pod_of_every_kind(target: str) -> None:
    lines = stages()[target]
    assert lines[-1] == "USER 1000"  # the fsGroup of deploy/checkpoint
    assert 'ENTRYPOINT ["tandem"]' in lines
    [script] = [line for line in lines if "gateway.sh" in line]
    [gateway] = [m for m in render(DEPLOY / "base") if m["kind"] == "Deployment"]
    [command] = gateway["spec"]["template"]["spec"]["containers"][0]["command"]
    assert script.endswith(f"/usr/local/bin/{command}")
    assert any("install --yes --no-install-recommends wget" in line for line in lines)


def needed(name: str, extras: tuple[str, ...] = ()) -> set[str]:
    """Return the normalized names of a distribution and of all its dependencies on this machine."""
    found, asked = set[str](), [(name, extras)]
    while asked:
        name, extras = asked.pop()
        if (key := canonicalize_name(name)) in found:
            continue
        found.add(key)
        for text in metadata.distribution(name).requires or []:
            one = Requirement(text)
            cases = [{"extra": extra} for extra in extras or ("",)]
            if one.marker is None or any(map(one.marker.evaluate, cases)):
                asked.append((one.name, tuple(one.extras)))
    return found


def test_the_image_has_what_the_tests_ran_on() -> None:
    """Compare package by package. Packages that only the image has need at least a version."""
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    own = (needed("tandem-serve") | needed("triton")) - {"tandem-serve"}
    told = {name: metadata.version(name).partition("+")[0] for name in own}
    assert told == {name: pinned.get(name) for name in own}
    of_ray = map(Requirement, metadata.requires("ray") or [])
    agent = {
        canonicalize_name(one.name) for one in of_ray if 'extra == "default"' in str(one.marker)
    }
    assert agent and agent <= pinned.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_pins_every_package(target: str) -> None:
    lines = stages()[target]
    [copied_to] = [line.split()[-1] for line in lines if "deploy/constraints.txt" in line]
    assert f"PIP_CONSTRAINT={copied_to}" in "\n".join(lines)


def test_a_build_is_sent_what_it_copies_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[1] == "*" and sent == {one for stage in stages() for one in copied(stage)}


RUN_TIME = {"cuda": {"gcc", "libc6-dev"}, "cpu": {"g++"}}
"""Packages that kernels need where they are compiled at run time. Debian's g++ depends on the C
library's headers."""


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_has_the_compilers_that_its_kernels_call(target: str) -> None:
    words = {word for line in stages()[target] if "apt-get" in line for word in line.split()}
    assert RUN_TIME[target] <= words


def test_kernels_that_the_cuda_target_compiles_are_kept_where_pods_may_write() -> None:
    told = [line.split()[1:] for line in stages()["cuda"] if line.startswith("ENV ")]
    env = dict(word.split("=") for words in told for word in words) | {"HOME": "/home/tandem"}
    command = sys.executable, "-c", "from triton import knobs; print(knobs.cache.dir)"
    kept = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    [cluster] = [m for m in render(DEPLOY / "overlays" / "gpu8") if m["kind"] == "RayCluster"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        [one] = group["template"]["spec"]["containers"]
        assert one["securityContext"]["readOnlyRootFilesystem"]
        places = [Path(mount["mountPath"]) for mount in one["volumeMounts"]]
        for path in (kept.strip(), env["CUDA_CACHE_PATH"]):
            assert any(Path(path).is_relative_to(place) for place in places), path


class Script:
    """The gateway script, running in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("ray", "tandem"):
            (folder / name).write_text(STUB)
            (folder / name).chmod(0o755)
        (folder / "sleep").symlink_to("/bin/true")
        env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "RAY_ADDRESS": "head:6379"}
        command = [str(DEPLOY / "gateway.sh"), "--config=x.yaml", "--set=a=b c"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=quiet, stderr=quiet)
        self._wait_for("asked")

    def touch(self, name: str) -> None:
        (self._folder / name).touch()

    def kill(self, name: str) -> None:
        os.kill(int((self._folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def said(self) -> list[str]:
        path = self._folder / "said"
        return path.read_text().splitlines() if path.exists() else []

    def begun(self) -> "Script":
        """Wait until the raylet and the gateway run."""
        self.touch("head-is-up")
        self._wait_for("ray.pid")
        self._wait_for("tandem.pid")
        return self

    def _wait_for(self, name: str) -> None:
        wait_until((self._folder / name).exists, f"no {name}")


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    running = Script(tmp_path)
    yield running
    running.touch("ray-ends")
    running.touch("tandem-ends")
    running.process.kill()
    running.process.wait()


def test_it_begins_when_the_head_is_there(script: Script) -> None:
    assert script.said() == []
    ray, tandem = sorted(script.begun().said())
    assert ray.startswith("ray start --address head:6379 --num-cpus 0 --num-gpus 0")
    assert ray.endswith("--block")
    assert tandem == "tandem serve --ray-address head:6379 --config=x.yaml --set=a=b c"


def test_sigterm_drains_the_gateway_once_then_ends_the_raylet(script: Script) -> None:
    script.begun().process.terminate()
    assert script.process.wait(30) == 7
    assert script.said()[2:] == ["tandem got TERM", "ray got TERM"]


def test_sigterm_is_heard_before_there_is_a_head(script: Script) -> None:
    script.process.terminate()
    assert script.process.wait(30) == 128 + signal.SIGTERM
    assert script.said() == []


def test_a_gateway_that_ends_takes_the_raylet_along(script: Script) -> None:
    script.begun().touch("tandem-ends")
    assert script.process.wait(30) == 3
    assert script.said()[2:] == ["ray got TERM"]


@pytest.mark.parametrize("name", ["ray", "tandem"])
def test_neither_outlives_the_other(script: Script, name: str) -> None:
    script.begun().kill(name)
    assert script.process.wait(30) != 0
    other = {"ray": "tandem", "tandem": "ray"}[name]
    assert script.said()[2:] == [f"{other} got TERM"]
