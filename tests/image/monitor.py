"""Run Debian's Prometheus in the namespace ``monitoring``, with the PodMonitors of deploy/."""

import json
from collections.abc import Mapping

import yaml

from tests.deployed import DEPLOY, container
from tests.image.scene import MONITOR, Scene
from tests.kustomize import render
from tests.waiting import wait_until

COMPONENT = DEPLOY / "components" / "monitoring"
ADDRESS = "127.0.0.1:9090"


def scraped(scene: Scene) -> dict[str, float]:
    """Return ``up`` by PodMonitor and pod, once all targets are scraped. promtool checks the
    config."""
    pod = scene.there[MONITOR]
    targets = _targets(scene)
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [*found]}]}
        for name, found in targets.items()
    ]
    [rules] = [one["spec"] for one in _component() if one["kind"] == "PrometheusRule"]
    (pod.home / "rules.yml").write_text(yaml.safe_dump(rules))
    told = {"global": {"scrape_interval": "1s"}, "rule_files": ["rules.yml"]}
    path = pod.home / "prometheus.yml"
    path.write_text(yaml.safe_dump(told | {"scrape_configs": jobs}))
    check = pod.run(("promtool", "check", "config", str(path)))
    text, _ = check.communicate(timeout=60)
    assert check.returncode == 0, text
    data = f"--storage.tsdb.path={pod.home / 'data'}"
    pod.run(
        ("prometheus", f"--config.file={path}", data, f"--web.listen-address={ADDRESS}"),
    )
    num_targets = sum(map(len, targets.values()))
    wait_until(lambda: sum(_up(scene).values()) == num_targets, f"{targets}")
    names = {address: name for found in targets.values() for address, name in found.items()}
    return {f"{job} {names[address]}": value for (job, address), value in _up(scene).items()}


def _targets(scene: Scene) -> Mapping[str, Mapping[str, str]]:
    """Return the addresses that each PodMonitor finds, with the names of their pods."""
    found: dict[str, dict[str, str]] = {}
    for monitor in _component():
        if monitor["kind"] != "PodMonitor":
            continue
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        [port] = [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]]
        found[monitor["metadata"]["name"]] = {
            f"{scene.there[name].address}:{one['containerPort']}": name
            for name, (labels, spec) in scene.told().items()
            if name in scene.running()
            if wanted <= labels.items()
            for one in container(spec)["ports"]
            if one["name"] == port
        }
    return found


def _component() -> list:
    return render(COMPONENT)


def _up(scene: Scene) -> dict[tuple[str, str], float]:
    address = f"http://{ADDRESS}/api/v1/query?query=up"
    process = scene.there[MONITOR].run(("curl", "--silent", "--fail", address))
    text, _ = process.communicate(timeout=60)
    if process.returncode:
        return {}
    result = json.loads(text)["data"]["result"]
    return {
        (one["metric"]["job"], one["metric"]["instance"]): float(one["value"][1]) for one in result
    }
