"""Layer 2: everything that knows of Ray and gRPC, and the life of a request."""

import os

# Ray forks its own servers while ours has gRPC threads: with fork handlers on, those hang.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
