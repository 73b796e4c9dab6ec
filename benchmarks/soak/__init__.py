"""Many requests of all shapes at once, ended in all ways, and every answer checked."""
