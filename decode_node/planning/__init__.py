"""Step planning: batch selection, draft length and execution mode. Plain Python."""
