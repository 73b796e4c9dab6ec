"""Whether a stranger's pip can install this project on Linux for x86-64: plain, and for developers.

Only what says where the registry is and how to reach it is taken over from pip's configuration;
folders and indexes with wheels of one's own are not. Nothing is installed. The exit code is 1 if
something cannot be resolved, and says what stands in the way.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_AT_ONCE = 3
PYTHONS = ("3.11", "3.12", "3.13")
TAKEN = ("index-url", "cert", "client-cert", "proxy", "trusted-host", "default-timeout")
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
    *(f"manylinux{name}_x86_64" for name in ("1", "2010", "2014")),
]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def environment() -> dict[str, str]:
    """Of a stranger who reaches the same registry."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    told = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    for line in told.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.rpartition(".")[2] in TAKEN:
            kept["PIP_" + name.rpartition(".")[2].upper().replace("-", "_")] = value.strip("'\"")
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain, extras = project["dependencies"], project["optional-dependencies"]
    wanted = {"plain": plain, "dev": [*plain, *extras["dev"]]}
    tries = [(python, name) for python in PYTHONS for name in wanted]
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        problems = threads.map(lambda one: resolve(one[0], wanted[one[1]]), tries)
        failed = False
        for (python, name), problem in zip(tries, problems, strict=True):
            print(f"Python {python}, {name}: {problem or 'resolves'}", flush=True)
            failed |= bool(problem)
    sys.exit(failed)


def resolve(python: str, asked: list[str]) -> str:
    """What keeps pip from it, if anything does."""
    where = [word for one in PLATFORMS for word in ("--platform", one)]
    with tempfile.TemporaryDirectory() as folder:
        # Wheels are looked into where they lie: some are gigabytes.
        how = ["--dry-run", "--quiet", "--use-feature=fast-deps", "--only-binary=:all:"]
        how += ["--ignore-installed", "--target", folder, "--implementation", "cp"]
        command = [*PIP, "install", *how, "--python-version", python, *where, *asked]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if ran.returncode == 0:
        return ""
    if "Failed to establish a new connection" in ran.stderr or "Max retries" in ran.stderr:
        return "the registry cannot be reached"
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("WARNING")]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
