"""Honest streams in parallel with hostile clients of one gateway.

``kinds/`` has one file per way to misbehave; ``client.py`` runs one of them as a process.
``honest.py`` measures honest streams, ``burner.py`` burns the control's CPU time, ``rounds.py``
alternates between both, and ``__main__.py`` is the command.
"""
