"""A real Envoy in front of gateways, configured as an ingress: health checks and round robin."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from tests.pods import Pod

IS_THERE = find_spec("envoy") is not None
GRPC, HTTP = 50051, 9400
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}
_CHECK = {
    "timeout": "2s",
    "interval": "1s",
    "no_traffic_interval": "1s",
    "unhealthy_threshold": 1,
    "healthy_threshold": 1,
    "http_health_check": {"path": "/readyz"},
}


def begin_envoy(pod: Pod, gateways: Sequence[Pod]) -> None:
    """Start Envoy on the gRPC port, in front of those of ``gateways`` that are ready."""
    path = pod.home / "envoy.json"
    path.write_text(json.dumps(_config([one.address for one in gateways])))
    command = ("envoy", "--config-path", str(path), "--concurrency", "1", "--log-level", "warn")
    pod.run((*command, "--disable-hot-restart"))


def _config(addresses: Sequence[str]) -> dict[str, Any]:
    checked = [
        {
            "endpoint": {
                "address": _socket(address, GRPC),
                "health_check_config": {"port_value": HTTP},
            }
        }
        for address in addresses
    ]
    cluster = {
        "name": "gateways",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": _HTTP2,
        "health_checks": [_CHECK],
        # Without this, Envoy sends to all endpoints when none is healthy.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "load_assignment": {"cluster_name": "gateways", "endpoints": [{"lb_endpoints": checked}]},
    }
    return {"static_resources": {"listeners": [_listener()], "clusters": [cluster]}}


def _listener() -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "gateways", "timeout": "0s"}}
    routes = {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]}
    filters = "type.googleapis.com/envoy.extensions.filters"
    router = {"@type": f"{filters}.http.router.v3.Router"}
    manager = {
        "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "door",
        "codec_type": "HTTP2",
        "route_config": routes,
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    name = "envoy.filters.network.http_connection_manager"
    chain = {"filters": [{"name": name, "typed_config": manager}]}
    return {"name": "door", "address": _socket("0.0.0.0", GRPC), "filter_chains": [chain]}


def _socket(address: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": address, "port_value": port}}
