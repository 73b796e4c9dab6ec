"""The computation of a decode step: row state, step functions and compiled programs."""
