"""All uses of Ray's private names, which may change with a version. Tested with 2.59 and 2.60.

``worker.print_to_stdstream`` receives Ray's diagnostics. ``services`` resolves an address, and
``authentication`` reads our token as Ray does. ``ray_constants`` and environment variables keep a
local Ray on the loopback interface. ``node.Node`` has two methods that start processes and are
replaced. The head's resource keeps the controller on the head. ``state`` lists draining machines
and free resources. Two environment variables bound the arguments that a call carries inline.
"""

import logging
import os

from ray._private import node, ray_constants, services, state, worker
from ray._private.authentication import authentication_token_setup as tokens

log = logging.getLogger(__name__)
HEAD_RESOURCE = "node:__internal_head__"
"""Resource of the machine on which Ray's head runs."""
_INLINE_BYTES = str(32 << 20)
"""Maximum bytes of arguments that a call carries inline: twice those of a client's message."""


def redirect_ray_messages() -> None:
    """Log Ray's diagnostics instead of printing them to stdout, which is reserved for answers."""
    worker.print_to_stdstream = lambda said, **_: log.warning("Ray: %s", "\n".join(said["lines"]))


def send_arguments_inline() -> None:
    """Make calls carry arguments of up to 32 MiB inline. Call this before Ray is started or joined.

    Ray puts arguments of more than 100 kB, for example prompts, into its object store. The pages of
    the store are in /dev/shm and not reserved. When /dev/shm is full, a write to them kills the
    gateway and Ray's own processes by SIGBUS.
    """
    names = "RAY_max_direct_call_object_size", "RAY_task_rpc_inlined_bytes_limit"
    os.environ |= dict.fromkeys(names, _INLINE_BYTES)


def draining_nodes() -> set[str]:
    """Return the ids of the machines that Ray drains. Blocks."""
    return set(state.state.get_draining_nodes())


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each machine, by its id. Blocks."""
    free: dict[str, dict[str, float]] = state.state.available_resources_per_node()
    return free


def resolve_head_address(address: str) -> str | None:
    """Load the user's Ray auth token and return the address of the Ray head at ``address``.

    Ray itself loads the token only if no address is given.
    """
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    found: str | None = services.canonicalize_bootstrap_address(address)
    return found


def isolate_local_ray() -> None:
    """Configure the local Ray that this process is about to start.

    Ray replaces a loopback address by an external one unless clusters are disabled. This process
    reads a constant of Ray for that, its child processes an environment variable. Ranks get
    niceness 0 instead of Ray's default, because one busy process would starve them. Ray's monitor
    and log monitor are not started: a local Ray never grows, and prints no logs here.
    """
    os.environ |= {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", "RAY_worker_niceness": "0"}
    ray_constants.ENABLE_RAY_CLUSTER = False
    node.Node.start_monitor = node.Node.start_log_monitor = lambda self: None
