"""External interface of a decode rank: RPC methods, sessions and token frames."""
