"""All that we use of Ray's private names, which a version may change; tried with 2.59 and 2.60.

``worker.print_to_stdstream`` gets what Ray says of its troubles; ``services`` finds the Ray of an
address, and ``authentication`` reads our token as Ray does; ``ray_constants`` and the variables
let a Ray of one's own listen on loopback only, and ``node.Node`` start fewer processes; the head's
resource keeps the controller where Ray itself lives; ``state`` tells which machines are to go, and
what is free on each. Two more variables bound what a call carries itself.
"""

import logging
import os

from ray._private import node, ray_constants, services, state, worker
from ray._private.authentication import authentication_token_setup as tokens

log = logging.getLogger(__name__)
HEAD_RESOURCE = "node:__internal_head__"
"""A resource of the machine where the cluster began."""
_INLINE_BYTES = str(32 << 20)
"""Twice the largest message of a client."""


def redirect_ray_messages() -> None:
    """Ray prints its troubles to stdout, which is for answers."""
    worker.print_to_stdstream = lambda said, **_: log.warning("Ray: %s", "\n".join(said["lines"]))


def send_arguments_inline() -> None:
    """Before a Ray is started or joined: let calls carry their arguments themselves.

    Ray puts arguments of more than 100 kB, such as long prompts, into its object store. Its pages
    lie in /dev/shm and are not reserved: when that is full, a write to them ends the gateway and
    Ray's own processes by SIGBUS.
    """
    names = "RAY_max_direct_call_object_size", "RAY_task_rpc_inlined_bytes_limit"
    os.environ |= dict.fromkeys(names, _INLINE_BYTES)


def draining_nodes() -> set[str]:
    """Ids of the machines that Ray drains. Blocks."""
    return set(state.state.get_draining_nodes())


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """By id of a machine, what is free of its resources. Blocks."""
    free: dict[str, dict[str, float]] = state.state.available_resources_per_node()
    return free


def resolve_head_address(address: str) -> str | None:
    """Where the Ray of ``--ray-address`` listens, once our token for it is read: Ray does that by
    itself only where it was given no address."""
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    found: str | None = services.canonicalize_bootstrap_address(address)
    return found


def isolate_local_ray() -> None:
    """Before a Ray of one's own starts. It replaces a loopback address by an outer one unless it is
    told that there is no cluster: this process reads the constant, those that it starts the
    variable. Nor are ranks nice, as Ray makes them: beside one busy process they would stand still.
    It never grows, and prints no logs here: two processes less at its start."""
    os.environ |= {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", "RAY_worker_niceness": "0"}
    ray_constants.ENABLE_RAY_CLUSTER = False
    node.Node.start_monitor = node.Node.start_log_monitor = lambda self: None
