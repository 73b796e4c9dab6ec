"""A decode rank: ``service`` to others, ``planning`` of steps, their ``program``."""
