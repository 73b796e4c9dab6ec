"""Enforce NetworkPolicy objects by nftables on the bridge of tests/pods.py, as a network plugin
does.

New connections that no policy allows are closed. Only TCP ingress is supported, which is all that
deploy/ uses.
"""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.kustomize import Manifest
from tests.pods import Pod

SYN = "tcp flags & (syn | ack) == syn"


@dataclass(frozen=True)
class Peer:
    """A pod as policies see it. By default it is in the cluster's namespace."""

    pod: Pod
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "tandem"
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports of its containers, by name."""


def enforce(switch: str, policies: Sequence[Manifest], peers: Sequence[Peer]) -> None:
    lines = [line for peer in peers for line in _rules(policies, peer, peers)]
    chain = "type filter hook forward priority 0; policy accept;"
    text = "\n".join(
        ["table bridge pods {", "chain forward {", chain, *lines, "}", "}"],
    )
    command = ["ip", "netns", "exec", switch, "nft", "-f", "-"]
    subprocess.run(command, input=text, text=True, check=True)


def _rules(policies: Sequence[Manifest], peer: Peer, peers: Sequence[Peer]) -> Iterator[str]:
    own = [one["spec"] for one in policies if _selects(one["spec"]["podSelector"], peer.labels)]
    if peer.namespace != "tandem" or not own:
        return
    to = f"ip daddr {peer.pod.address} {SYN}"
    for spec in own:
        assert spec["policyTypes"] == ["Ingress"]
        for rule in spec["ingress"]:
            assert rule.keys() <= {"from", "ports"}
            named = [port["port"] for port in rule.get("ports", [])]
            ports = [str(peer.ports[one]) for one in named if one in peer.ports]
            if named and not ports:
                continue
            where = f"tcp dport {{ {', '.join(ports)} }} " if ports else ""
            if "from" not in rule:
                yield f"{to} {where}accept"
                continue
            for one in peers:
                if any(_admits(source, one) for source in rule["from"]):
                    yield f"{to} ip saddr {one.pod.address} {where}accept"
    yield f"{to} drop"


def _admits(source: Manifest, peer: Peer) -> bool:
    assert source.keys() <= {"podSelector", "namespaceSelector"}
    if (spaces := source.get("namespaceSelector")) is None:
        return peer.namespace == "tandem" and _selects(source["podSelector"], peer.labels)
    is_there = _selects(spaces, {"kubernetes.io/metadata.name": peer.namespace})
    return is_there and _selects(source.get("podSelector", {"matchLabels": {}}), peer.labels)


def _selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return bool(selector["matchLabels"].items() <= labels.items())
