"""Everything that uses Ray and gRPC: cluster control, gateway, entrypoints, client and commands."""

import os

# Ray forks servers while this process has gRPC threads. With gRPC's fork handlers they would hang.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
