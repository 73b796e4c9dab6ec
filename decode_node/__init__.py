"""The decode rank: RPC ``service``, step ``planning`` and tensor ``program``."""
