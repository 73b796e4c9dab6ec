"""The decode rank: ``service`` (RPC), ``planning`` (of steps) and ``program`` (tensor programs)."""
