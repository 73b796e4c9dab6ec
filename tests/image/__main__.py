"""Build the image, apply it in three forms and request tokens (tests/image/__init__.py).

    make image-test
    python -m tests.image --only base     # use the existing image

The exit code is 1 if a command of deploy/README.md fails or its output differs from that page.
"""

import argparse
import shutil
import sys
import time

from rich.console import Console
from rich.table import Table

from tests.deployed import Deployed, container, deployed
from tests.image import cuda
from tests.image.build import PYPI, answers, find_base, size_bytes
from tests.image.monitor import scraped
from tests.image.readme import Walk
from tests.image.scene import Scene, scene
from tests.pods import CAN_RUN

TAG = "tandem:0.1.0-cpu"
FIRST_TOKEN, CHANGES = "From an empty cluster to a first token", "Changes"
PACKAGES = {
    "buildah": "buildah",
    "podman": "podman",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "curl": "curl",
    "prometheus": "prometheus",
}
CHANGE = "speculation: {max_depth: 1}\n"
TWO_PODS = """
prefill: {node_group: prefill, dp_size: 2, num_threads: 1}
decode: {node_group: decode, dp_size: 2, num_threads: 1}
"""
ASK = "tandem", "generate", "def fibonacci(n):", "--address=tandem:50051"
STATUS = "tandem", "status", "--address=tandem:50051"
console = Console()


def over_two_pods() -> Deployed:
    """Return a deployment with gangs of two ranks, each rank in a separate pod."""
    it = deployed("base")
    it.config_map["data"]["tandem.yaml"] = TWO_PODS
    for group in it.groups.values():
        group["numOfHosts"] = 2
    return it


FORMS = {"base": lambda: deployed("base"), "two-pods": over_two_pods}


def walk() -> str:
    """Follow README's steps to a first token and to a changed config; return the text of the
    token."""
    began = time.monotonic()
    with Walk(lambda text: console.print(f"  {text}", markup=False)) as one:
        one.through(FIRST_TOKEN)
        *texts, status = one.texts
        assert len(texts) == 2 and texts[0] == texts[1], texts
        ranks = [name for name in ("prefill-0", "decode-0") if name in status]
        assert len(ranks) == 2, status
        console.print(f"  from README's first command: {time.monotonic() - began:.0f} s")
        report("cpu", one.scene)
        one.change = CHANGE
        one.through(CHANGES)
        assert "up to 1 drafts per step" in one.scene.in_client(*STATUS)
        assert one.scene.in_client(*ASK) == texts[0]
    return texts[0]


def apply(name: str, it: Deployed) -> str:
    with scene(it, TAG) as made:
        made.begin()
        made.wait_provisioned()
        for gateway in made.gateways:
            made.wait_ready(gateway)
        console.print(f"  ready after {time.monotonic() - made.began_at:.0f} s")
        text = made.in_client(*ASK)
        report(name, made)
        return text


def report(name: str, made: Scene) -> None:
    """Print the targets that Prometheus scrapes and the memory of each pod."""
    up = scraped(made)
    assert all(value == 1.0 for value in up.values()), up
    table = Table(title=f"{name}: the most that each has held, page cache included")
    for title in ("pod", "MiB", "limit", "CPUs"):
        table.add_column(title)
    for pod, (num_bytes, limit) in made.memory().items():
        cpus = container(made.told()[pod][1])["resources"]["limits"]["cpu"]
        table.add_row(pod, f"{num_bytes / 2**20:.0f}", limit, str(cpus))
    console.print(table, f"Prometheus reads {len(up)} targets")


def resolve() -> None:
    """Check that the packages of the CUDA target are compatible. Nothing else of it is tested
    here."""
    if answers(f"{PYPI}/torch/"):
        console.print(f"the cuda target: {cuda.check()} packages go together, all pinned")
    else:
        console.print(f"the cuda target: NOT LOOKED AT, {PYPI} does not answer", style="red")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.image",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ["cuda", "readme", *FORMS]
    parser.add_argument("--only", choices=parts, help="this one, not all of them")
    args = parser.parse_args()
    missing = sorted(package for tool, package in PACKAGES.items() if shutil.which(tool) is None)
    if missing:
        parser.error(f"needs Debian's packages: apt-get install {' '.join(missing)}")
    if not CAN_RUN:
        parser.error("needs root")
    if args.only in (None, "cuda"):
        resolve()
    texts = {}
    if args.only in (None, "readme"):
        console.print(f"the image goes on from: {find_base()}")
        texts["cpu"] = walk()
    if args.only == "cuda":
        return
    console.print(f"{TAG}: {size_bytes(TAG) / 1e9:.2f} GB")
    for name, make in FORMS.items():
        if args.only in (None, name):
            console.rule(name)
            texts[name] = apply(name, make())
    sys.exit(len({*texts.values()}) != 1)


if __name__ == "__main__":
    main()
